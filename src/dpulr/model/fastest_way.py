"""The fastest way to run a model: as a program, replayed from a layer on, or as it is. It must give the model's own losses."""

from __future__ import annotations

import logging
import warnings
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dpulr.errors import InvalidArgument
from dpulr.model.batches import call_on_copy, count, row
from dpulr.model.equal_rows import EqualRows
from dpulr.model.exported import export
from dpulr.model.exported_layers import is_worth_it
from dpulr.model.graph import Untraceable, trace
from dpulr.model.losses import LossFunction
from dpulr.model.passes import Move, Passes
from dpulr.model.replay import TracedPasses
from dpulr.model.scratch import Scratch
from dpulr.model.trained_layers import find_layers
from dpulr.model.trials import CLOSE, SEED, Probe, other_weights, probes_of
from dpulr.model.value_reads import Seen, observe
from dpulr.model.whole_passes import HookedPasses
from dpulr.randomness import public_seed

_LOG = logging.getLogger("dpulr")


def exported_if_better(
    model: nn.Module, loss_fn: LossFunction, example: tuple[Any, Any], device: torch.device, seen: Seen, sites: bool
) -> tuple[nn.Module, LossFunction, Seen]:
    """The model as a program, where it reads values, or where torch.fx would run all of it again for each layer; else as it is."""
    probes = probes_of(example, device)
    why = seen.reads if seen.reads is not None or not sites else _not_by_fx(model, probes[0][0])
    if why is None:
        return model, loss_fn, seen
    find_layers(model, shared=True)  # what can't be trained at all is named first
    try:
        program, of_output = export(model, loss_fn, probes)
        _verify_export((model, loss_fn), (program, of_output), probes[1], draws=seen.draws)
        found = observe(program, of_output, example, device)
        if found.reads is not None:
            raise Untraceable(found.reads)
    except Exception as problem:  # whatever it is: the model itself is checked next, and what is wrong with it is said then
        _LOG.info("The model is run as it is: %s", problem)
        return model, loss_fn, seen
    _LOG.info("The model is run as a program of torch.export, because %s", why)
    return program, of_output, found


def _not_by_fx(model: nn.Module, inputs: Any) -> str | None:
    """Why torch.fx is not enough, in words."""
    if is_worth_it(model):
        return "it has parameters beside its layers, or layers that return several tensors"
    try:
        with Scratch.of(model).fresh():
            trace(model, inputs, [layer.module for layer in find_layers(model, shared=True)])
    except Untraceable as problem:
        return f"torch.fx can't trace it: {problem}"
    return None


def traced_if_possible(whole: HookedPasses, probes: list[Probe], method: str, *, draws: bool) -> Passes:
    if method == "hook":
        return whole
    try:
        traced = TracedPasses(whole.model, whole.loss_fn, whole.layers, whole.marks, probes, scratch=whole.scratch)
        with other_weights(whole.model.parameters(), keep=1.0):
            _verify(traced, whole, probes[1], draws=draws)
            if whole.scratch.places:
                _verify_from_other_state(traced, whole, probes[1], draws=draws)
    except Untraceable as problem:
        if method == "trace":
            raise InvalidArgument(f"the model can't be traced: {problem}") from problem
        warnings.warn(f"running whole forward passes, which is slower, because {problem}", stacklevel=5)
        return whole
    return traced


def _verify_export(model: Any, program: Any, probe: Probe, *, draws: bool) -> None:
    """Program and model must agree on a batch, and on a record alone; with dropout, under equal masks."""

    def losses(parts: Any, batch: Probe) -> Tensor:
        public_seed(SEED)
        with EqualRows(1, counted=False) if draws else nullcontext():
            found: Tensor = parts[1](call_on_copy(parts[0], batch[0]), batch[1])
        return found

    rows = [row(probe, i) for i in range(count(probe[1]))]
    for keep in (1.0, 0.0):
        with other_weights(model[0].parameters(), keep=keep), torch.inference_mode(), torch.random.fork_rng():
            alone = [losses(model, one) for one in rows]
            same = torch.allclose(torch.cat(alone), losses(program, probe), **CLOSE)
            if not same or not torch.allclose(alone[0], losses(program, rows[0]), **CLOSE):
                raise Untraceable("its export does not give the model's losses")


def _verify(traced: TracedPasses, whole: HookedPasses, probe: Probe, *, draws: bool) -> None:
    """Replay and whole passes must agree at every layer; with dropout, under equal masks."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.random.fork_rng())
        public_seed(SEED)
        if draws:
            stack.enter_context(EqualRows(1, counted=False))
        clean, hooked = traced.clean(*probe), whole.clean(*probe)
        for i, call in enumerate(clean.calls):
            moved = call.output + 0.3 * torch.randn(2, *call.output.shape, dtype=call.output.dtype, device=call.output.device)
            pairs = [
                (clean.losses, hooked.losses),
                (traced.losses(clean, [Move(i, moved)]), whole.losses(hooked, [Move(i, moved)])),
            ]
            if not all(torch.allclose(a, b, **CLOSE) for a, b in pairs):
                raise Untraceable(f"replaying it from {traced.layers[i].label} does not give the losses of the whole model")


def _verify_from_other_state(traced: TracedPasses, whole: HookedPasses, probe: Probe, *, draws: bool) -> None:
    """A graph leaves out what a forward pass does to reset its state: it must not matter what that was."""
    start = whole.scratch
    with torch.inference_mode(), start.fresh():
        call_on_copy(whole.model, probe[0])
        traced.scratch = whole.scratch = Scratch(start.places)
        try:
            _verify(traced, whole, probe, draws=draws)
        finally:
            traced.scratch = whole.scratch = start
