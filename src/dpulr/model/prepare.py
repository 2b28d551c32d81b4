"""Set-up: check a model on synthetic inputs and find the fastest way to run it that gives its losses: a finished `Forward`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpulr import validate
from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.model.batches import call_on_copy, synthetic
from dpulr.model.black_box import stand_ins
from dpulr.model.equal_rows import EqualRows
from dpulr.model.forward import Forward
from dpulr.model.graph import Untraceable
from dpulr.model.layers import Call, is_foreign, rule_for
from dpulr.model.layers.affine import AffineRule
from dpulr.model.layers.check import check_rule
from dpulr.model.losses import LossFunction
from dpulr.model.opaque import uncompiled, without_compiling
from dpulr.model.passes import Marks, Move, Passes, hooks
from dpulr.model.quantised import refuse_observers
from dpulr.model.replay import TracedPasses
from dpulr.model.row_independence import check_rows, other_weights
from dpulr.model.scratch import Scratch
from dpulr.model.shared_sites import RepeatedSite, SharedSite
from dpulr.model.sites import OutputSite, Site, Space, WeightSite, make_site
from dpulr.model.trained_layers import (
    Layer,
    by_turns,
    find_layers,
    model_as_one_layer,
    refuse_calls,
    sharing,
    with_enclosing_module,
)
from dpulr.model.value_reads import observe
from dpulr.model.weights import WeightFunction
from dpulr.model.whole_passes import HookedPasses, RecordwisePasses

_PROBE_SIZES = (2, 3)
_SEED = 20_240_301  # public: only synthetic inputs depend on it
_CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}
Probe = tuple[Any, Any]
Whole = Callable[..., HookedPasses]


def prepare(
    model: nn.Module,
    loss_fn: LossFunction,
    example: tuple[Any, Any],
    device: torch.device,
    *,
    space: Space = "auto",
    method: str = "auto",
    shared: bool = False,
    again: bool = False,
    weights: WeightFunction | None = None,
    sites: bool = True,
) -> Forward:
    """Check the model on synthetic inputs and return the fastest forward that gives its losses.

    `example` is a batch of one record, of which only shapes and types are used. `method` is "auto", "trace" or "hook". `weights`
    gives each record's weight. Without `sites` no layer will be moved by itself: the model is run as a whole, and may hold its
    parameters wherever it likes.
    `shared`: parameters may be shared, by layers or by calls of one; `again`: a linear layer or convolution may be called again.
    """
    validate.one_of("replay", method, ("auto", "trace", "hook"))
    model = uncompiled(model)
    refuse_observers(model)
    with without_compiling(model), stand_ins(model, loss_fn) as random:
        for box in random:
            warnings.warn(
                f"the black box {box.name!r} gives other values on each call: differences of losses hold that noise, too. It gets "
                "one record at a time, and whether it learns from what it sees can't be checked",
                stacklevel=3,
            )
        if not sites:
            return _as_a_whole(model, loss_fn, example, device, weights)
        return _prepare(model, loss_fn, example, device, space, method, shared, again, weights)


def _prepare(
    model: nn.Module,
    loss_fn: LossFunction,
    example: tuple[Any, Any],
    device: torch.device,
    space: Space,
    method: str,
    shared: bool,
    again: bool,
    weights: WeightFunction | None,
) -> Forward:
    layers = find_layers(model, shared=shared)
    seen = observe(model, loss_fn, example, device)
    scratch = check_rows(model, loss_fn, example, device, seen=seen)
    recordwise = seen.reads is not None
    generator = torch.Generator().manual_seed(_SEED)
    probes = [synthetic(example, size, generator, device) for size in _PROBE_SIZES]
    kind: Whole = partial(RecordwisePasses if recordwise else HookedPasses, scratch=scratch)
    if recordwise and (len(sharing(layers)) < len(layers) or _skips_layers(kind(model, loss_fn, layers), probes)):
        layers = model_as_one_layer(model)
    turns = partial(_with_turns, kind(model, loss_fn, []), probes[0], shared) if (shared or again) and not recordwise else None
    layers, marks = _with_plain_outputs(kind, model, loss_fn, layers, probes, turns)
    whole = kind(model, loss_fn, layers, marks)
    with other_weights(model.parameters(), keep=1.0):
        _refuse_use_elsewhere(whole, probes[1])
    moved_again = not shared and any(layer.turn > 0 for layer in layers)  # not all calls lie downstream of the first
    if moved_again and method == "trace":
        raise InvalidArgument("a layer is called several times, so that only whole passes move all of its calls: leave replay out.")
    passes = whole if recordwise or moved_again else _traced_if_possible(whole, probes, method, draws=seen.draws)
    if recordwise:
        if method == "trace":
            raise InvalidArgument(f"the model can't be traced: {seen.reads}.")
        warnings.warn(f"running records one by one, which is slow, because {seen.reads}", stacklevel=4)
    with other_weights(model.parameters(), keep=1.0):
        _check_alignment(passes, probes[1])
    return _finished(passes, probes, space, weights, SharedSite if shared else RepeatedSite)


def _as_a_whole(
    model: nn.Module,
    loss_fn: LossFunction,
    example: tuple[Any, Any],
    device: torch.device,
    weights: WeightFunction | None,
) -> Forward:
    """The model without a look at its layers. A parameter that several of them use is listed once."""
    seen = observe(model, loss_fn, example, device)
    scratch = check_rows(model, loss_fn, example, device, seen=seen)
    if seen.reads is not None:
        warnings.warn(f"running records one by one, which is slow, because {seen.reads}", stacklevel=4)
    kind = HookedPasses if seen.reads is None else RecordwisePasses
    passes = kind(model, loss_fn, [], scratch=scratch)
    generator = torch.Generator().manual_seed(_SEED)
    probes = [synthetic(example, size, generator, device) for size in _PROBE_SIZES]
    with torch.inference_mode():
        first, second = [_allocated(partial(passes.clean, *probe))[1] for probe in probes]
    known: set[nn.Parameter] = set()
    sites = []
    for layer in find_layers(model, shared=True):
        own = {name: p for name, p in layer.parameters.items() if p not in known}
        known.update(own.values())
        if own:
            sites.append(WeightSite(layer, rule_for(layer.module, own), torch.Size(())))
    return Forward(passes, sites, bytes_per_record=max(second - first, 1), replay_bytes=(), probe=probes[0], weights=weights)


# --- which layers, which way to run them --------------------------------------------------------------------------------
def _skips_layers(passes: Passes, probes: list[Probe]) -> bool:
    """Whether a branch leaves out a layer, or runs it twice: then only the whole model is called just once for every record."""
    try:
        with torch.inference_mode():
            for probe in probes:
                passes.clean(*probe)
    except ModelRefused:
        return True
    return False


def _with_plain_outputs(
    kind: Whole,
    model: nn.Module,
    loss_fn: LossFunction,
    layers: list[Layer],
    probes: list[Probe],
    turns: Callable[[list[Layer]], list[Layer]] | None,
) -> tuple[list[Layer], Marks]:
    """Layers that return one tensor with a row per record. One that does not (recurrent, say) gives way to the module around it."""
    while True:
        layers = layers if turns is None else turns(layers)
        passes = kind(model, loss_fn, layers)
        with torch.inference_mode():
            small, large = [passes.clean(*probe).calls for probe in probes]
        marks = []
        for layer, a, b in zip(layers, small, large, strict=True):
            try:
                marks.append(_carries_records(layer, a, b))
            except ModelRefused:
                if layer.module is model:
                    raise
                before, layers = layers, with_enclosing_module(model, layers, layer)
                if len(before) > 1 and layers[0].module is model:
                    _warn_of_one_layer(layer)
                break
        else:
            return layers, tuple(marks)


def _with_turns(passes: HookedPasses, probe: Probe, shared: bool, layers: list[Layer]) -> list[Layer]:
    """The layers, each as often as a pass calls it; unless `shared`, only those that have a joint move."""
    calls = dict.fromkeys((layer.module for layer in layers), 0)
    alone = [] if shared else [layer for layer in layers if not isinstance(rule_for(layer.module, layer.parameters), AffineRule)]

    def note(module: nn.Module, *_: Any) -> None:
        calls[module] += 1

    with torch.inference_mode(), hooks([(module, note) for module in calls]):
        passes.clean(*probe)
    for layer in alone:
        refuse_calls(layer, calls[layer.module])
    return by_turns(layers, calls)


def _warn_of_one_layer(layer: Layer) -> None:
    warnings.warn(
        f"{layer.label} does not return one tensor with a row per record, so the whole model around it is perturbed at once: "
        "slower and noisier. A module of your own around that layer, which returns its output only, avoids it",
        stacklevel=6,
    )


def _traced_if_possible(whole: HookedPasses, probes: list[Probe], method: str, *, draws: bool) -> Passes:
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


def _finished(
    passes: Passes, probes: list[Probe], space: Space, weights: WeightFunction | None, joint_site: type[SharedSite]
) -> Forward:
    """Make the sites, and measure the memory of a row by two passes of different size."""
    with torch.inference_mode():
        (small, first), (large, second) = [_allocated(partial(passes.clean, *probe)) for probe in probes]
        per_record = max(second - first, 1)
        sites, replay_bytes = [], []
        for i, (layer, call) in enumerate(zip(passes.layers, small.calls, strict=True)):
            _refuse_half(layer, call)
            again = passes.turns[layer.module] > 1 and joint_site is RepeatedSite
            site = make_site(layer, call.output.shape[1:], "output" if again else space, call)
            site.rule.scratch = passes.scratch
            if isinstance(site, WeightSite):
                _check_weights(site, call)
            if is_foreign(site.rule):
                check_rule(site.rule, call, site.label, output_space=isinstance(site, OutputSite))
            first, second = [
                _allocated(partial(passes.losses, clean, [Move(i, clean.calls[i].output.unsqueeze(0))]))[1]
                for clean in (small, large)
            ]
            sites.append(site)
            replay_bytes.append(max(second - first, 1))
    uses = sharing(passes.layers)
    joint = [sites[members[0]] if len(members) == 1 else joint_site([sites[i] for i in members]) for members in uses]
    replay_bytes = [sum(replay_bytes[i] for i in members) for members in uses]
    sizes: dict[str, Any] = {"bytes_per_record": per_record, "replay_bytes": replay_bytes, "probe": probes[0]}
    return Forward(passes, joint, uses=uses, weights=weights, **sizes)


def _allocated(run: Callable[[], Any]) -> tuple[Any, int]:
    with _Allocations() as allocations:
        result = run()
    return result, allocations.bytes


# --- refusals -----------------------------------------------------------------------------------------------------------
def _check_weights(site: Site, call: Call) -> None:
    """The layer must run with weights of each record's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.func on what it batches slowly
        out = site.moved(call, torch.zeros(1, call.records, site.full_dim, dtype=call.output.dtype, device=call.output.device))
    if not bool(torch.isfinite(out).all()) and bool(torch.isfinite(call.output).all()):
        raise ModelRefused(f"{site.label} does not run with weights of a record's own (torch.func.functional_call).")


def _refuse_half(layer: Layer, call: Call) -> None:
    for leaf in pytree.tree_leaves((call.args, call.kwargs, call.output)):
        if isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16):
            raise ModelRefused(
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
            raise ModelRefused(
                f"{layer.label} sees tensors of shape {tuple(a.shape)} for {_PROBE_SIZES[0]} records. The first axis must "
                "count the records, one row each (batch_first=True; flatten positions into later axes, not into the first)."
            )
        marks.append(True)
    if not isinstance(small.output, Tensor) or not marks.pop():
        raise ModelRefused(f"{layer.label} must return one tensor whose first axis counts the records.")
    return tuple(marks)


def _refuse_use_elsewhere(passes: Passes, probe: Probe) -> None:
    """With a layer's output held fixed, its weights must not matter: what they do elsewhere would never be trained."""
    alone = [members[0] for members in sharing(passes.layers) if len(members) == 1]
    with torch.inference_mode(), torch.random.fork_rng():
        clean = passes.clean(*probe)
        for i, layer in enumerate(passes.layers):
            if i not in alone:  # what it shares is used elsewhere on purpose
                continue
            fixed = clean.calls[i].output.unsqueeze(0)
            torch.manual_seed(_SEED)
            base = passes.losses(clean, [Move(i, fixed.clone())])  # the model may overwrite it
            with other_weights(layer.parameters.values(), keep=1.0):
                torch.manual_seed(_SEED)
                moved = passes.losses(clean, [Move(i, fixed.clone())])
            if not torch.allclose(base, moved, **_CLOSE):
                raise ModelRefused(
                    f"weights of {layer.label} are used outside of it, too (tied by hand, or a penalty in the loss). That use "
                    "would not be trained. Untie them, give penalties to the optimizer (weight_decay), or freeze them "
                    "(requires_grad_(False))."
                )


def _verify(traced: TracedPasses, whole: HookedPasses, probe: Probe, *, draws: bool) -> None:
    """Replay and whole passes must agree at every layer; with dropout, under equal masks."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.random.fork_rng())
        torch.manual_seed(_SEED)
        if draws:
            stack.enter_context(EqualRows(1, counted=False))
        clean, hooked = traced.clean(*probe), whole.clean(*probe)
        for i, call in enumerate(clean.calls):
            moved = call.output + 0.3 * torch.randn(2, *call.output.shape, dtype=call.output.dtype, device=call.output.device)
            pairs = [
                (clean.losses, hooked.losses),
                (traced.losses(clean, [Move(i, moved)]), whole.losses(hooked, [Move(i, moved)])),
            ]
            if not all(torch.allclose(a, b, **_CLOSE) for a, b in pairs):
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


def _check_alignment(passes: Passes, probe: Probe) -> None:
    """Noise on a record must reach that record's loss only."""
    with torch.inference_mode(), torch.random.fork_rng():
        for i, layer in enumerate(passes.layers):
            torch.manual_seed(_SEED)
            clean = passes.clean(*probe)
            output = clean.calls[i].output
            moved = output.clone()
            moved[0] += torch.randn_like(moved[0])
            found = []
            for own in (output, moved):
                torch.manual_seed(_SEED)
                found.append(passes.losses(clean, [Move(i, own.unsqueeze(0))])[0, 0, 1:])
            if not torch.allclose(found[0], found[1], **_CLOSE):
                raise ModelRefused(f"downstream of {layer.label} records are mixed: noise on record 0 reaches the loss of another.")


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.bytes += sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor))
        return out
