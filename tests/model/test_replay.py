"""Replay of what lies downstream of a site gives the losses of the whole model, on any model, without gradients."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dpulr
from dpulr.errors import InvalidArgument
from dpulr.model.batches import call_model
from dpulr.model.forward import Forward
from dpulr.model.passes import Move, Passes
from dpulr.model.prepare import prepare
from dpulr.model.replay import TracedPasses
from dpulr.model.whole_passes import HookedPasses, RecordwisePasses
from tests.support import zoo
from tests.support.core import CPU, LOSS, engine

Example = tuple[Any, Any]


def flat(records: int) -> Example:
    return torch.randn(records, 6), torch.randint(3, (records,))


def image(records: int) -> Example:
    return torch.randn(records, 3, 8, 8), torch.randint(3, (records,))


def pair(records: int) -> Example:
    return (torch.randn(records, 4), torch.randint(7, (records, 3))), torch.randint(3, (records,))


def named(records: int) -> Example:
    (a, words), target = pair(records)
    return {"words": words, "a": a}, target


def masked(records: int) -> Example:
    inputs, target = named(records)
    return {**inputs, "mask": torch.ones(records, 5)}, target


TRACED: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Example]]] = {
    "mlp": (lambda: dpulr.models.mlp((6, 7, 5, 3)), flat),
    "resnet5": (lambda: dpulr.models.resnet5(classes=3), image),
    "branches": (zoo.Branches, flat),
    "in place": (zoo.InPlace, flat),
    "input in place": (zoo.Overwrites, flat),
    "sizes as numbers": (zoo.Shapes, flat),
    "numpy in a module": (zoo.BoxInside, flat),
    "recurrent": (zoo.Recurrent, flat),
    "attention": (zoo.Attention, flat),
    "out of order": (zoo.OutOfOrder, flat),
    "two inputs": (zoo.TwoInputs, pair),
    "named inputs": (zoo.TwoInputs, named),
    "optional input": (zoo.TwoInputs, masked),
    "dropout in eval": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(), nn.Linear(5, 3)).eval(), flat),
}
WHOLE: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Example], type[Passes], str]] = {
    "if on values": (zoo.ValueBranch, flat, RecordwisePasses, "one by one, .* reads the value of a tensor"),
    "if on values chooses a layer": (zoo.Experts, flat, RecordwisePasses, "one by one, .* reads the value of a tensor"),
    "numpy inline": (zoo.InlineBox, flat, HookedPasses, "whole forward passes"),
    "the model is the layer": (lambda: nn.GRUCell(6, 3), flat, HookedPasses, "the model itself holds the parameters"),
}


def built(make: Callable[[], nn.Module], example: Callable[[int], Example], **settings: Any) -> Forward:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return prepare(make(), LOSS, example(1), CPU, **settings)


def literal(forward: Forward, batch: Example, index: int, delta: Tensor) -> Tensor:
    """Each repeat by a pass of the whole model over each record alone, with a hook that adds the noise."""
    inputs, targets = batch
    leaves, spec = torch.utils._pytree.tree_flatten(inputs)
    losses = torch.empty(delta.shape[:2])
    for r in range(delta.shape[0]):
        for i in range(delta.shape[1]):
            row = torch.utils._pytree.tree_unflatten([leaf[i : i + 1].clone() for leaf in leaves], spec)
            hook = forward.sites[index].layer.module.register_forward_hook(lambda m, a, out, d=delta[r, i : i + 1]: out + d)
            output = call_model(forward.model, row)
            hook.remove()
            losses[r, i] = LOSS(output, targets[i : i + 1])[0]
    return losses


@pytest.mark.parametrize("name", [*TRACED, *WHOLE])
def test_losses_are_those_of_the_whole_model(name: str) -> None:
    make, example = (TRACED[name] if name in TRACED else WHOLE[name])[:2]
    methods = ["trace", "hook"] if name in TRACED else ["hook"]
    for method in methods:
        forward = built(make, example, method=method)
        batch = example(4)
        with torch.inference_mode():
            clean = forward.passes.clean(*batch)
            for i, site in enumerate(forward.sites):
                delta = torch.randn(3, 4, *site.output_shape)
                found = forward.losses(clean, i, clean.calls[i].output + delta)
                torch.testing.assert_close(found, literal(forward, batch, i, delta), rtol=1e-5, atol=1e-5)
            first = torch.zeros(1, 4, *forward.sites[0].output_shape)
            torch.testing.assert_close(clean.losses, literal(forward, batch, 0, first)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*TRACED, *WHOLE])
def test_one_pass_for_many_sites_gives_the_losses_of_each_alone(name: str) -> None:
    """All sites, every pair of them in either order, and every other one."""
    make, example = (TRACED[name] if name in TRACED else WHOLE[name])[:2]
    forward = built(make, example)
    count = len(forward.sites)
    choices = [tuple(range(count)), tuple(range(0, count, 2)), *itertools.permutations(range(count), 2)]
    batch = example(4)
    with torch.inference_mode():
        clean = forward.passes.clean(*batch)
        moved = [clean.calls[i].output + torch.randn(3, 4, *site.output_shape) for i, site in enumerate(forward.sites)]
        alone = [literal(forward, batch, i, rows - clean.calls[i].output) for i, rows in enumerate(moved)]
        for sites in choices:
            found = forward.all_losses(clean, [Move(i, moved[i].clone()) for i in sites])
            torch.testing.assert_close(found, torch.stack([alone[i] for i in sites]), rtol=1e-5, atol=1e-5)


def test_a_record_that_raises_on_the_way_raises_alone() -> None:
    """In a pass for all sites, one row of one site at which a black box raises gets NaN; all others keep their losses."""
    model = nn.Sequential(nn.Linear(6, 5), zoo.Refuses(), nn.Linear(5, 3))
    forward = built(lambda: model, flat)
    batch = flat(4)
    with torch.inference_mode():
        clean = forward.passes.clean(*batch)
        moved = [call.output.repeat(2, 1, 1) for call in clean.calls]
        moved[0][1, 2, 0] = 1e6
        losses = forward.all_losses(clean, [Move(i, rows) for i, rows in enumerate(moved)])
    assert torch.isnan(losses).nonzero().tolist() == [[0, 1, 2]]
    torch.testing.assert_close(losses[1], clean.losses.repeat(2, 1))


@pytest.mark.parametrize("name", TRACED)
def test_what_can_be_traced_is_traced(name: str) -> None:
    make, example = TRACED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(prepare(make(), LOSS, example(1), CPU).passes, TracedPasses)


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_is_run_whole_and_said_once(name: str) -> None:
    make, example, kind, message = WHOLE[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forward = prepare(make(), LOSS, example(1), CPU)
        with torch.inference_mode():
            for _ in range(3):
                clean = forward.passes.clean(*example(2))
                forward.losses(clean, 0, clean.calls[0].output.unsqueeze(0))
    assert type(forward.passes) is kind
    assert len(caught) == 1
    assert re.search(message, str(caught[0].message))
    with pytest.raises(InvalidArgument, match="can't be traced"):
        prepare(make(), LOSS, example(1), CPU, method="trace")


def test_only_what_lies_downstream_is_replayed() -> None:
    """The stem of a deep model is not run again for a site behind it."""
    model = dpulr.models.mlp((6, 5, 4, 3))
    forward = built(lambda: model, flat)
    calls: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, a, o, name=name: calls.append(name))
    with torch.inference_mode():
        clean = forward.passes.clean(*flat(2))
        calls.clear()
        forward.losses(clean, 1, clean.calls[1].output.unsqueeze(0))
    assert calls == ["4", "5"]


def test_a_branch_on_values_belongs_to_the_record() -> None:
    """`if x.sum() > 3` over a batch would let one record choose the branch of the others."""
    forward = built(zoo.ValueBranch, flat)
    x, y = torch.full((1, 6), 0.1), torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode():
        alone = forward.passes.clean(x, y).losses
        beside = forward.passes.clean(torch.cat([x, torch.full((1, 6), 100.0)]), y.repeat(2)).losses
    assert alone[0] == beside[0]


READS: dict[str, Callable[[Tensor], object]] = {
    "bool": lambda large: bool(large.any()),
    "item": lambda large: large.any().item(),
    "float": lambda large: float(large.sum()),
    "tolist": lambda large: large.any().tolist(),
    "equal": lambda large: not torch.equal(large, torch.zeros_like(large)),
    "mask": lambda large: len(large[large]),
    "nonzero": lambda large: torch.nonzero(large).numel(),
    "unique": lambda large: len(torch.unique(large)) > 1,
}


@pytest.mark.parametrize("name", READS)
def test_however_values_are_read_a_record_chooses_for_itself_alone(name: str) -> None:
    forward = built(lambda: zoo.Reads(READS[name]), flat)
    x, y = torch.full((1, 6), 0.1), torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode():
        alone = forward.passes.clean(x, y).losses
        beside = forward.passes.clean(torch.cat([x, torch.full((1, 6), 100.0)]), y.repeat(2)).losses
    assert alone[0] == beside[0]


def _picks(large: Tensor) -> bool:
    F.one_hot(large[:, torch.tensor([5, 0])].long(), num_classes=2)
    return False


def test_indexing_by_numbers_reads_no_values() -> None:
    assert not built(lambda: zoo.Reads(_picks), flat).recordwise


def test_a_layer_that_a_branch_leaves_out_never_stops_a_step() -> None:
    """Whether a layer is called depends on private values: the whole model is the layer then."""
    forward = built(zoo.Experts, flat)
    assert [site.name for site in forward.sites] == [""]
    x, y = torch.cat([torch.full((1, 6), 1.0), torch.full((1, 6), -1.0)]), torch.zeros(2, dtype=torch.int64)
    with torch.inference_mode():
        clean = forward.passes.clean(x, y)
        delta = torch.zeros(1, 2, forward.sites[0].dim)
        delta[..., : 6 * 5 + 5] = 1.0  # the weights of `low`
        moved = forward.losses(clean, 0, forward.sites[0].moved(clean.calls[0], delta))[0]
    assert moved[0] == pytest.approx(clean.losses[0].item(), rel=1e-5)
    assert abs(moved[1] - clean.losses[1]) > 1e-3


def test_a_layer_that_drags_others_along_is_named() -> None:
    with pytest.warns(UserWarning, match=r"'attention' \(MultiheadAttention\) does not return one tensor .* the whole model"):
        prepare(zoo.Drags(), LOSS, flat(1), CPU, method="hook")  # an export would make it a site of its own


class Watch(TorchDispatchMode):
    """Fails if an operation runs outside inference mode; the optimizer does, and room for its gradients is made there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.updating = 0, False
        aten = torch.ops.aten
        room = (
            aten.zeros.default,
            aten.zeros_like.default,
            aten.empty_like.default,
            aten.split_with_sizes.default,
            aten.view.default,
        )
        self.outside = set(room)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        free = self.updating or func.namespace == "profiler" or func in self.outside
        assert free or torch.is_inference_mode_enabled(), func
        return func(*args, **(kwargs or {}))


class Announced(torch.optim.SGD):
    """Tells when it updates."""

    def __init__(self, model: nn.Module, watch: Watch) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.watch = watch

    def step(self, closure: Any = None) -> None:
        self.watch.updating = True
        super().step(closure)
        self.watch.updating = False


@pytest.mark.parametrize("name", ["mlp", "resnet5", "recurrent", "if on values", "numpy inline"])
def test_nothing_ever_requires_grad(name: str) -> None:
    make, example = (TRACED[name] if name in TRACED else WHOLE[name])[:2]
    torch.manual_seed(0)
    model, watch = make(), Watch()
    inputs, targets = example(12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = torch.utils.data.TensorDataset(inputs, targets)
        optimizer = Announced(model, watch)
        private = engine(model, data, optimizer=optimizer, mechanism=dpulr.Gaussian(repeats=2), batch_size=6, steps=2)
    for batch in private.batches():
        with watch:
            private.step(*batch)
    assert watch.seen > 10
    assert all(p.grad is None or not p.grad.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", [*TRACED, *WHOLE])
def test_the_model_is_left_as_it_was(name: str) -> None:
    make, example = (TRACED[name] if name in TRACED else WHOLE[name])[:2]
    torch.manual_seed(0)
    model = make()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = [(set(vars(m)), m.training, dict(m._forward_hooks)) for m in model.modules()]
    parameters = [id(p) for p in model.parameters()]
    random_state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forward = prepare(model, LOSS, example(1), CPU)
        with torch.inference_mode(), forward.checked_mode():
            forward.passes.clean(*example(2))
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [(set(vars(m)), m.training, dict(m._forward_hooks)) for m in model.modules()] == attributes
    assert [id(p) for p in model.parameters()] == parameters
    assert not any(p.is_inference() for p in model.parameters())
    torch.set_rng_state(random_state)


def test_steps_run_in_the_mode_that_was_checked() -> None:
    """BatchNorm in eval mode is harmless; a later model.train() must not bring its statistics back."""
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3)).eval()
    forward = built(lambda: model, flat)
    model.train()
    x, y = flat(3)
    with torch.inference_mode(), forward.checked_mode():
        losses = forward.passes.clean(x, y).losses
        torch.testing.assert_close(forward.passes.clean(x[:1], y[:1]).losses, losses[:1])
    assert model.training
    assert model[1].num_batches_tracked == 0


def test_frozen_parameters_have_no_site() -> None:
    model = dpulr.models.mlp((6, 5, 4, 3))
    model[1].requires_grad_(False)
    model[3].weight.requires_grad_(False)
    forward = built(lambda: model, flat)
    assert [(site.name, list(site.parameters)) for site in forward.sites] == [("3", ["bias"]), ("5", ["weight", "bias"])]


def test_the_smaller_space_is_the_default() -> None:
    forward = built(lambda: dpulr.models.resnet5(), lambda records: (torch.randn(records, 3, 20, 20), torch.zeros(records).long()))
    assert [site.space for site in forward.sites] == ["weight", "weight", "weight", "weight", "output"]
    assert {s.space for s in built(lambda: dpulr.models.mlp((6, 5, 3)), flat).sites} == {"output"}
    assert {s.space for s in built(lambda: dpulr.models.mlp((6, 5, 3)), flat, space="weight").sites} == {"weight"}


def test_dropout_is_replayed_with_fresh_masks() -> None:
    model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(), nn.Linear(50, 3))
    forward = built(lambda: model, flat)
    assert isinstance(forward.passes, TracedPasses)
    with torch.inference_mode():
        clean = forward.passes.clean(*flat(2))
        losses = forward.losses(clean, 0, clean.calls[0].output.expand(4, -1, -1))
    assert len(losses[:, 0].unique()) == 4
