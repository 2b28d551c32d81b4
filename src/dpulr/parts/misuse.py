"""What would void a guarantee behind the engine's back: steps of the optimizer, or changes of parameters, that it did not make.
And arguments that other libraries, or the mechanisms, have.

The optimizer and the parameters are the user's. An update from `loss.backward()` in the same loop would put exact gradients into
the weights, and no epsilon would cover that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Report = Callable[[str], None]
_OF_THE_MECHANISM = "belongs to the mechanism: mechanism=dpulr.{}({}=...)"
_ELSEWHERE = {
    "module": "is the first argument, the model",
    "data_loader": "is the third argument, the data set (loader.dataset): the engine draws the batches",
    "criterion": "is the fourth argument, a loss with one value per record",
    "epsilon": "is called target_epsilon",
    "delta": "is called target_delta",
    "poisson_sampling": "is called sampling, and is 'poisson' unless you say otherwise",
    **{name: _OF_THE_MECHANISM.format("Gradient", name) for name in ("max_grad_norm", "clipping")},
    **{name: _OF_THE_MECHANISM.format("HiddenDirection", name) for name in ("repeats", "radius", "kappa", "last_layer", "exact")},
}


def refuse(names: Iterable[str]) -> None:
    """Arguments that nobody knows; or whose name or place is another one here, which is said."""
    for name in names:
        if name in _ELSEWHERE:
            raise TypeError(f"{name} {_ELSEWHERE[name]} (docs/from-opacus.md).")
        raise TypeError(f"PrivacyEngine has no argument {name!r}.")


class Watch:
    """Reports, once each, a step of the optimizer and a change of a parameter that did not come from `own_step`.

    `frozen` are parameters that no step changes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        report: Report,
        frozen: Sequence[nn.Parameter] = (),
    ) -> None:
        self._watched = [(parameter, True) for parameter in parameters] + [(parameter, False) for parameter in frozen]
        self._views: list[tuple[torch.Size, int, Tensor] | None] = [None] * len(self._watched)
        self._own, self._report = False, report
        self._seen = self._fingerprint()
        optimizer.register_step_pre_hook(self._before_step)

    @contextmanager
    def own_step(self) -> Iterator[None]:
        """While it lasts, the engine itself steps."""
        self._own = True
        try:
            yield
        finally:
            self._own = False
            self.accept()

    def accept(self) -> None:
        """Take the parameters as they are now."""
        self._seen = self._fingerprint()

    def check(self) -> None:
        """Report parameters that changed since they were last accepted."""
        if self._fingerprint() != self._seen:
            self.accept()
            self._report(
                f"parameters were changed between two steps by something else than engine.step(){_place()}. If the new values are "
                "public, or were released by this run, say so with engine.parameters_changed(public=True) after the change"
            )

    def _before_step(self, *_: Any) -> None:
        if not self._own:
            self._report(
                f"optimizer.step() was called beside engine.step(){_place()}: what it put into the weights is not covered. Take "
                "loss.backward() and optimizer.step() out of the loop: engine.step() does all of it"
            )

    def _fingerprint(self) -> list[tuple[int, int, int]]:
        """How often a parameter was changed in place, where it lies, and the sum of its bits: `.data` and numpy change that alone.

        Of frozen ones, which may be many, only the first bits.
        """
        with torch.inference_mode():
            found = []
            for i, (parameter, trained) in enumerate(self._watched):
                place, known = parameter.data_ptr(), self._views[i]
                if known is None or known[0] != parameter.shape or known[1] != place:  # kept while it lies where it lay
                    bits = _bits(parameter if trained else parameter.flatten()[:1])
                    known = self._views[i] = parameter.shape, bits.data_ptr(), bits
                found.append((parameter._version, place, int(known[2].sum())))
            return found


def _bits(values: Tensor) -> Tensor:
    """The bits of numbers, 64 of them at a time if that comes out even: sums of these are quickest."""
    flat = values.detach().contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    width = flat.element_size()
    even = flat.numel() * width % 8 == flat.storage_offset() * width % 8 == 0
    return flat.view(_WHOLE[8 if even else width])


_WHOLE = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _place() -> str:
    """The line of the user's program that is being run, in words."""
    here = Path(__file__).parents[1]
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if here not in path.parents and "torch" not in path.parts and "contextlib" not in path.name:
            return f" ({path.name}, line {frame.f_lineno})"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
