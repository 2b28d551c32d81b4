"""TorchScript modules: they run with their own parameters only, so each record's weights are put there, one record at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dpulr.model.batches import copied
from dpulr.model.layers.base import Call, LayerRule
from dpulr.model.rescue import each_alone


class ScriptRule(LayerRule):
    """Weight space of a TorchScript module. torch.func can't look into it: tried, it ends the process."""

    def with_weights(self, call: Call, flat: Tensor) -> Tensor:
        out = torch.full((*flat.shape[:2], *call.output.shape[1:]), math.nan).to(call.output)

        def row(place: tuple[int, int]) -> None:
            repeat, i = place
            with self._moved(flat[repeat, i]):
                out[repeat, i] = self._run(call.rows(i, i + 1))[0]

        each_alone(((repeat, i) for repeat in range(len(flat)) for i in range(call.records)), row)
        return out

    def record_weight_gradients(self, call: Call, slope: Tensor) -> Tensor:
        out = torch.zeros(call.records, self.weight_dim).to(slope)

        def row(i: int) -> None:
            output = self._run(call.rows(i, i + 1))
            found = torch.autograd.grad(output, list(self.parameters.values()), slope[i : i + 1], allow_unused=True)
            parts = zip(found, self.parameters.values(), strict=True)
            out[i] = torch.cat([(torch.zeros_like(p) if part is None else part).flatten() for part, p in parts])

        with torch.inference_mode(False), torch.enable_grad():
            args, kwargs, output, slope = copied((call.args, call.kwargs, call.output, slope))  # of inference mode no longer
            call = Call(args, kwargs, output, call.per_record)
            each_alone(range(call.records), row)
        return out

    def _run(self, call: Call) -> Tensor:
        with self.scratch.fresh():
            out: Tensor = self.module(*call.args, **call.kwargs)
        return out

    @contextmanager
    def _moved(self, by: Tensor) -> Iterator[None]:
        """The weights plus `by`, for a while. Afterwards they are bit for bit what they were."""
        before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        for name, delta in self.split(by).items():
            self.parameters[name].data.add_(delta)
        try:
            yield
        finally:
            for name, value in before.items():
                self.parameters[name].data.copy_(value)
