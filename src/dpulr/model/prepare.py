"""Set-up of the forward passes: check a model on made-up inputs and find the fastest way to run it that gives its losses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpulr.model.batches import like
from dpulr.model.graph import Untraceable
from dpulr.model.layers import Call
from dpulr.model.replay import Forward, HookedForward, LoneForward, TracedForward
from dpulr.model.row_independence import LossFunction, check_rows, other_weights, reads_values, without_dropout
from dpulr.model.sites import Layer, Site, Space, enclosing, find_layers, whole

_PROBE_SIZES = (2, 3)
_SEED = 20_240_301  # public: only made-up inputs depend on it


def prepare(
    model: nn.Module,
    loss_fn: LossFunction,
    example: tuple[Any, Any],
    device: torch.device,
    *,
    space: Space = "auto",
    method: str = "auto",
) -> Forward:
    """Check the model on made-up inputs and return the fastest forward that gives its losses.

    `example` is a batch of one record, of which only shapes and types are used. `method` is "auto", "trace" or "hook".
    """
    if method not in ("auto", "trace", "hook"):
        raise ValueError(f"replay is {method!r}; it must be 'auto', 'trace' or 'hook'.")
    layers = find_layers(model)
    alone = reads_values(model, loss_fn, example, device)
    check_rows(model, loss_fn, example, device, alone=alone)
    generator = torch.Generator().manual_seed(_SEED)
    probes = [like(example, size, generator, device) for size in _PROBE_SIZES]
    kind = LoneForward if alone else HookedForward
    if alone and _skips_layers(kind(model, loss_fn, layers), probes):
        layers = whole(model)
    layers = _with_plain_outputs(model, layers, lambda found: kind(model, loss_fn, found), probes)
    with other_weights(model.parameters(), keep=1.0):
        _refuse_use_elsewhere(kind(model, loss_fn, layers), probes[1])
    if alone:
        problem = "the forward pass or the loss reads the value of a tensor, as an `if` or .item() does"
        if method == "trace":
            raise ValueError(f"the model can't be traced: {problem}.")
        warnings.warn(f"running records one by one, which is slow, because {problem}", stacklevel=3)
    elif method != "hook":
        try:
            traced = TracedForward(model, loss_fn, layers, probes[0][0])
            _finish(traced, probes, space)
            with other_weights(model.parameters(), keep=1.0):
                _verify(traced, HookedForward(model, loss_fn, layers), probes[1])
            traced.probe = probes[0]
            return traced
        except Untraceable as problem:
            if method == "trace":
                raise ValueError(f"the model can't be traced: {problem}") from problem
            warnings.warn(f"running whole forward passes, which is slower, because {problem}", stacklevel=3)
    hooked = kind(model, loss_fn, layers)
    _finish(hooked, probes, space)
    with other_weights(model.parameters(), keep=1.0):
        _check_alignment(hooked, probes[1])
    hooked.probe = probes[0]
    return hooked


def _skips_layers(forward: Forward, probes: list[tuple[Any, Any]]) -> bool:
    """Whether a branch leaves out a layer, or runs it twice: then only the whole model is called just once for every record."""
    try:
        with torch.inference_mode():
            for probe in probes:
                forward.clean(*probe)
    except ValueError:
        return True
    return False


def _with_plain_outputs(
    model: nn.Module, layers: list[Layer], forward: Callable[[list[Layer]], Forward], probes: list[tuple[Any, Any]]
) -> list[Layer]:
    """Layers that return one tensor with a row per record. One that does not (recurrent, say) gives way to the module around it."""
    while True:
        with torch.inference_mode():
            small, large = [forward(layers).clean(*probe).calls for probe in probes]
        for layer, a, b in zip(layers, small, large, strict=True):
            try:
                _carries_records(layer, a, b)
            except ValueError:
                if layer.module is model:
                    raise
                before, layers = layers, enclosing(model, layers, layer)
                if len(before) > 1 and layers[0].module is model:
                    warnings.warn(
                        f"{layer.label} does not return one tensor with a row per record, so the whole model around it is "
                        "perturbed at once: slower and noisier. A module of your own around that layer, which returns its output "
                        "only, avoids it",
                        stacklevel=4,
                    )
                break
        else:
            return layers


def _finish(forward: Forward, probes: list[tuple[Any, Any]], space: Space) -> None:
    """Fill in what two probing passes show: which arguments carry records, the sites' shapes, the memory of a row."""
    with torch.inference_mode():
        (small, first), (large, second) = [_allocated(partial(forward.clean, *probe)) for probe in probes]
        forward.bytes_per_row = max(second - first, 1)
        if isinstance(forward, TracedForward):
            forward.learn(small, large)
        for i, (layer, a, b) in enumerate(zip(forward.layers, small.calls, large.calls, strict=True)):
            _refuse_half(layer, a)
            forward.per_record.append(_carries_records(layer, a, b))
            site = Site(layer, a.output.shape[1:], space)
            if site.space == "weight":
                _check_weights(site, Call(a.args, a.kwargs, a.output, forward.per_record[-1]))
            first, second = [
                _allocated(partial(forward.losses, clean, i, clean.calls[i].output.unsqueeze(0)))[1] for clean in (small, large)
            ]
            site.replay_bytes = max(second - first, 1)
            forward.sites.append(site)


def _allocated(run: Callable[[], Any]) -> tuple[Any, int]:
    with _Allocations() as allocations:
        result = run()
    return result, allocations.bytes


def _check_weights(site: Site, call: Call) -> None:
    """The layer must run with weights of each record's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.func on what it batches slowly
        out = site.perturbed(call, torch.zeros(1, call.records, site.dim, dtype=call.output.dtype, device=call.output.device))
    if not bool(torch.isfinite(out).all()) and bool(torch.isfinite(call.output).all()):
        raise ValueError(f"{site.layer.label} does not run with weights of a record's own (torch.func.functional_call).")


def _refuse_half(layer: Layer, call: Call) -> None:
    for leaf in pytree.tree_leaves((call.args, call.kwargs, call.output)):
        if isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"{layer.label} sees or returns values of type {leaf.dtype}: their rounding is coarser than the bound on a record. "
                "Run its forward pass in float32, without autocast."
            )


def _carries_records(layer: Layer, small: Call, large: Call) -> tuple[bool, ...]:
    """For each argument of the call: does its first axis count the records? Any other growth with the batch is refused."""
    marks = []
    leaves = zip(
        [*pytree.tree_leaves((small.args, small.kwargs)), small.output],
        [*pytree.tree_leaves((large.args, large.kwargs)), large.output],
        strict=True,
    )
    for a, b in leaves:
        if not isinstance(a, Tensor) or a.shape == b.shape:
            marks.append(False)
            continue
        if a.shape[1:] != b.shape[1:] or (a.shape[0], b.shape[0]) != _PROBE_SIZES:
            raise ValueError(
                f"{layer.label} sees tensors of shape {tuple(a.shape)} for {_PROBE_SIZES[0]} records. The first axis must "
                "count the records, one row each (batch_first=True; flatten positions into later axes, not into the first)."
            )
        marks.append(True)
    if not isinstance(small.output, Tensor) or not marks.pop():
        raise ValueError(f"{layer.label} must return one tensor whose first axis counts the records.")
    return tuple(marks)


def _refuse_use_elsewhere(forward: HookedForward, probe: tuple[Any, Any]) -> None:
    """With a layer's output held fixed, its weights must not matter: what they do elsewhere would never be trained."""
    with torch.inference_mode(), torch.random.fork_rng():
        clean = forward.clean(*probe)
        for i, layer in enumerate(forward.layers):
            fixed = clean.calls[i].output.unsqueeze(0)
            torch.manual_seed(_SEED)
            base = forward.losses(clean, i, fixed.clone())  # the model may overwrite it
            with other_weights(layer.parameters.values(), keep=1.0):
                torch.manual_seed(_SEED)
                moved = forward.losses(clean, i, fixed.clone())
            if not torch.allclose(base, moved, rtol=1e-4, atol=1e-5, equal_nan=True):
                raise ValueError(
                    f"weights of {layer.label} are used outside of it, too (tied by hand, or a penalty in the loss). That use "
                    "would not be trained. Untie them, give penalties to the optimizer (weight_decay), or freeze them "
                    "(requires_grad_(False))."
                )


def _verify(traced: TracedForward, hooked: HookedForward, probe: tuple[Any, Any]) -> None:
    """Replay and whole passes must agree at every site, and a record's noise must reach that record's loss only."""
    _check_alignment(traced, probe)
    with torch.inference_mode(), torch.random.fork_rng(), without_dropout(traced.model):
        torch.manual_seed(_SEED)
        clean, whole = traced.clean(*probe), hooked.clean(*probe)
        for i, call in enumerate(clean.calls):
            perturbed = call.output + 0.3 * torch.randn(2, *call.output.shape, dtype=call.output.dtype, device=call.output.device)
            pairs = [
                (clean.losses, whole.losses),
                (traced.losses(clean, i, perturbed), hooked.losses(whole, i, perturbed)),
            ]
            if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True) for a, b in pairs):
                raise Untraceable(f"replaying it from {traced.layers[i].label} does not give the losses of the whole model")


def _check_alignment(forward: Forward, probe: tuple[Any, Any]) -> None:
    with torch.inference_mode(), torch.random.fork_rng():
        for i, layer in enumerate(forward.layers):
            torch.manual_seed(_SEED)
            clean = forward.clean(*probe)
            output = clean.calls[i].output
            moved = output.clone()
            moved[0] += torch.randn_like(moved[0])
            torch.manual_seed(_SEED)
            base = forward.losses(clean, i, output.unsqueeze(0))[0]
            torch.manual_seed(_SEED)
            if not torch.allclose(
                forward.losses(clean, i, moved.unsqueeze(0))[0, 1:], base[1:], rtol=1e-4, atol=1e-5, equal_nan=True
            ):
                raise ValueError(f"downstream of {layer.label} records are mixed: noise on record 0 reaches the loss of another.")


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.bytes += sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor))
        return out
