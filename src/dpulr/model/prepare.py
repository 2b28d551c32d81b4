"""Set-up: check a model on synthetic inputs and find the fastest way to run it that gives its losses: a finished `Forward`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpulr import validate
from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.model.black_box import stand_ins
from dpulr.model.fastest_way import exported_if_better, traced_if_possible
from dpulr.model.forward import Forward
from dpulr.model.layer_checks import carries_records, check_alignment, check_weights, refuse_half, refuse_use_elsewhere
from dpulr.model.layers import is_foreign, rule_for
from dpulr.model.layers.affine import AffineRule
from dpulr.model.layers.check import check_rule
from dpulr.model.losses import LossFunction
from dpulr.model.opaque import uncompiled, without_compiling
from dpulr.model.passes import Marks, Move, Passes, hooks
from dpulr.model.quantised import refuse_observers
from dpulr.model.row_independence import LARGEST, check_rows
from dpulr.model.scratch import Scratch
from dpulr.model.shared_sites import RepeatedSite, SharedSite
from dpulr.model.sites import OutputSite, Space, WeightSite, make_site
from dpulr.model.trained_layers import (
    Layer,
    by_turns,
    find_layers,
    model_as_one_layer,
    refuse_calls,
    sharing,
    with_enclosing_module,
)
from dpulr.model.trials import Probe, other_weights, probes_of
from dpulr.model.value_reads import Seen, observe
from dpulr.model.weights import WeightFunction
from dpulr.model.whole_passes import HookedPasses, RecordwisePasses

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
    rows: int = 0,
) -> Forward:
    """Check the model on synthetic inputs and return the fastest forward that gives its losses.

    `example` is a batch of one record, of which only shapes and types are used. `method` is "auto", "trace" or "hook". `weights`
    gives each record's weight. Without `sites` no layer will be moved by itself: the model is run as a whole, and may hold its
    parameters wherever it likes.
    `shared`: parameters may be shared, by layers or by calls of one; `again`: a linear layer or convolution may be called again.
    `rows` is how many a pass of a step may have: the model is tried with so many, if its size allows.
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
        seen = observe(model, loss_fn, example, device)
        if method == "auto":
            model, loss_fn, seen = exported_if_better(model, loss_fn, example, device, seen, sites)
        find_layers(model, shared=shared or not sites)  # what can't be trained at all is named first
        scratch = check_rows(model, loss_fn, example, device, seen=seen, largest=max(rows, LARGEST))
        if not sites:
            return _as_a_whole(model, loss_fn, example, device, seen, scratch, weights)
        return _prepare(model, loss_fn, example, device, seen, scratch, space, method, shared, again, weights)


def _prepare(
    model: nn.Module,
    loss_fn: LossFunction,
    example: tuple[Any, Any],
    device: torch.device,
    seen: Seen,
    scratch: Scratch,
    space: Space,
    method: str,
    shared: bool,
    again: bool,
    weights: WeightFunction | None,
) -> Forward:
    layers = find_layers(model, shared=shared)
    recordwise = seen.reads is not None
    probes = probes_of(example, device)
    kind: Whole = partial(RecordwisePasses if recordwise else HookedPasses, scratch=scratch)
    if recordwise and (len(sharing(layers)) < len(layers) or _skips_layers(kind(model, loss_fn, layers), probes)):
        layers = model_as_one_layer(model)
    turns = partial(_with_turns, kind(model, loss_fn, []), probes[0], shared) if (shared or again) and not recordwise else None
    layers, marks = _with_plain_outputs(kind, model, loss_fn, layers, probes, turns)
    whole = kind(model, loss_fn, layers, marks)
    with other_weights(model.parameters(), keep=1.0):
        refuse_use_elsewhere(whole, probes[1])
    moved_again = not shared and any(layer.turn > 0 for layer in layers)  # not all calls lie downstream of the first
    if moved_again and method == "trace":
        raise InvalidArgument("a layer is called several times, so that only whole passes move all of its calls: leave replay out.")
    passes = whole if recordwise or moved_again else traced_if_possible(whole, probes, method, draws=seen.draws)
    if recordwise:
        if method == "trace":
            raise InvalidArgument(f"the model can't be traced: {seen.reads}.")
        warnings.warn(f"running records one by one, which is slow, because {seen.reads}", stacklevel=4)
    with other_weights(model.parameters(), keep=1.0):
        check_alignment(passes, probes[1])
    return _finished(passes, probes, space, weights, SharedSite if shared else RepeatedSite)


def _as_a_whole(
    model: nn.Module,
    loss_fn: LossFunction,
    example: tuple[Any, Any],
    device: torch.device,
    seen: Seen,
    scratch: Scratch,
    weights: WeightFunction | None,
) -> Forward:
    """The model without a look at its layers. A parameter that several of them use is listed once."""
    if seen.reads is not None:
        warnings.warn(f"running records one by one, which is slow, because {seen.reads}", stacklevel=4)
    kind = HookedPasses if seen.reads is None else RecordwisePasses
    passes = kind(model, loss_fn, [], scratch=scratch)
    probes = probes_of(example, device)
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
                marks.append(carries_records(layer, a, b))
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


def _finished(
    passes: Passes, probes: list[Probe], space: Space, weights: WeightFunction | None, joint_site: type[SharedSite]
) -> Forward:
    """Make the sites, and measure the memory of a row by two passes of different size."""
    with torch.inference_mode():
        (small, first), (large, second) = [_allocated(partial(passes.clean, *probe)) for probe in probes]
        per_record = max(second - first, 1)
        sites, replay_bytes = [], []
        for i, (layer, call) in enumerate(zip(passes.layers, small.calls, strict=True)):
            refuse_half(layer, call)
            again = passes.turns[layer.module] > 1 and joint_site is RepeatedSite
            site = make_site(layer, call.output.shape[1:], "output" if again else space, call)
            site.rule.scratch = passes.scratch
            if isinstance(site, WeightSite):
                check_weights(site, call)
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


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.bytes += sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor))
        return out
