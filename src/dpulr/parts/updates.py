"""From released numbers to the optimizer: buffers that become `.grad`, for all layers at once or for one group after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpulr.mechanisms.base import FittedMechanism, Gradients, OnePiece
from dpulr.model.forward import Forward


class Updates:
    """The groups of layers that are updated one after the other, and the gradients of the group whose turn it is.

    Only optimizers of torch itself are stepped group by group: another may count its steps, or look at all gradients together.
    """

    def __init__(self, forward: Forward, fitted: FittedMechanism[object], optimizer: torch.optim.Optimizer) -> None:
        groups = fitted.streams if type(optimizer).__module__.startswith("torch.optim.") else []
        self.groups = groups if len(groups) > 1 else [list(range(len(forward.sites)))]
        self._sites, self._gradients = forward.sites, Gradients()

    def buffers(self, group: list[int]) -> Gradients:
        """For the gradients of these sites: where there are several groups, each has buffers for its own turn only."""
        if len(self.groups) > 1 or not self._gradients:
            with torch.inference_mode(False):  # what becomes .grad is a plain tensor
                self._gradients = buffers_for([site.parameters if i in group else {} for i, site in enumerate(self._sites)])
        return self._gradients

    def assign(self, group: list[int], optimizer: torch.optim.Optimizer) -> None:
        """Hand the gradients to the optimizer. Whatever else stood there did not come from this step."""
        found: dict[int, Tensor] = {}
        for i in group:
            site, buffers = self._sites[i], self._gradients[i]
            site.rule.leave_untrained(buffers)
            for name, parameter in site.parameters.items():
                found[id(parameter)] = buffers[name]
        for parameters in optimizer.param_groups:
            for parameter in parameters["params"]:
                parameter.grad = found.get(id(parameter))


def buffers_for(sites: Sequence[dict[str, nn.Parameter]]) -> Gradients:
    """Zeros for each parameter; in one piece, where all are plain and of one type."""
    parameters = [p for site in sites for p in site.values()]
    if len({(p.dtype, p.device) for p in parameters}) != 1 or not all(p.is_contiguous() for p in parameters):
        return [{name: torch.zeros_like(p) for name, p in site.items()} for site in sites]
    sizes = [p.numel() for p in parameters]
    flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    views = iter(flat.split_with_sizes(sizes))
    return OnePiece([{name: next(views).view(p.shape) for name, p in site.items()} for site in sites], flat)
