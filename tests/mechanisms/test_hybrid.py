"""`HiddenDirection(exact=...)`: hidden directions before the last point that can't be differentiated, exact gradients behind it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpulr
from dpulr.accounting.events import HiddenDirectionRelease
from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.mechanisms.base import WITH_MARGIN
from dpulr.model.differentiable import exact_layers
from tests.support.core import LOSS, engine, fit, parts_of, points, total, train

Auto = dpulr.HiddenDirection(exact="auto")


class NumpyBox(nn.Module):
    """Takes no tensor that has a history."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.function(x.numpy())).to(x)


class Sign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sign()


class _Surrogate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0.2).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope / (1 + 3 * ctx.saved_tensors[0].abs()) ** 2


class Spike(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Surrogate.apply(x)


class StraightThrough(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + (x.sign() - x).detach()


class Doubled(nn.Module):
    """Its gradient is wrong by a factor."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x - x.detach())


class Beside(nn.Module):
    """A block with a way around it, and layers that are not registered in the order of their calls."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.last, self.first, self.block = nn.Linear(7, 3), nn.Linear(6, 7), block

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.tanh(x + self.block(x)))


def around(block: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7), block, nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 3))


BLOCKS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "relu": (nn.ReLU, True),
    "max": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 7)), nn.MaxPool1d(2, 1, 1), nn.Flatten(), nn.ConstantPad1d((0, -1), 0)),
        True,
    ),
    "dropout": (lambda: nn.Dropout(0.4), True),
    "numpy": (lambda: NumpyBox(np.tanh), False),
    "sign": (Sign, False),
    "spike": (Spike, False),
    "straight-through": (StraightThrough, False),
    "wrong by a factor": (Doubled, False),
}


# --- where the border lies --------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:running")
@pytest.mark.parametrize("name", BLOCKS)
def test_the_border_is_found(name: str) -> None:
    make, smooth = BLOCKS[name]
    private = engine(around(make()), points(), mechanism=Auto)
    assert private.mechanism.exact == (("0", "2", "4", "6") if smooth else ("4", "6"))
    said = private.notes
    assert all(found.exact for found in exact_layers(private.forward).values()) == smooth
    if smooth:
        assert len(said) == 1
        assert "'gradient' (DP-SGD) reaches the same epsilon faster" in said[0]
    else:
        assert [("'0' (Linear)" in said[0], "'2' (Linear)" in said[1])] == [(True, True)]
        assert all(note.startswith("Hidden directions: ") for note in said)


@pytest.mark.parametrize(("block", "exact"), [(nn.Tanh(), ("last", "first")), (Sign(), ("last",)), (Spike(), ("last",))])
def test_a_way_around_a_block_does_not_hide_it(block: nn.Module, exact: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    assert engine(Beside(block), points(), mechanism=Auto).mechanism.exact == exact


def test_a_layer_that_starts_at_zero_hides_nothing() -> None:
    model = around(nn.Tanh())
    nn.init.zeros_(model[6].weight)
    assert engine(model, points(), mechanism=Auto).mechanism.exact == ("0", "2", "4", "6")


def test_advice_by_model_and_mechanism() -> None:
    data = points(600)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said before the first step
        whole = engine(around(nn.Tanh()), data, mechanism="hidden-direction")
        partly = engine(around(Spike()), data, mechanism="hidden-direction")
        exact = engine(around(nn.Tanh()), data, mechanism="gradient")
    assert [note.split(":")[0] for private in (whole, partly, exact) for note in private.notes] == [
        "This model can be differentiated from end to end",
        "Exact gradients can be had, by one backward pass per step, for '4', '6'",
    ]
    assert partly.mechanism == dpulr.HiddenDirection(repeats=partly.choice.repeats)  # nothing is changed by advice


def test_looking_for_advice_changes_nothing() -> None:
    private = engine(around(nn.Tanh()), points(600), mechanism="hidden-direction", steps=2)
    before = [p.clone() for p in private.model.parameters()]
    assert private.notes
    assert all(torch.equal(a, b) for a, b in zip(before, private.model.parameters(), strict=True))
    assert train(private) == 2
    assert private.guarantee == "certified"


# --- what a step adds up ----------------------------------------------------------------------------------------------------
def boxed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), NumpyBox(np.tanh), nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))
    return model.double()


def some(records: int = 9) -> tuple[Tensor, Tensor]:
    x, y = points(records, dtype=torch.float64).tensors
    return 3 * x, y


EXAMPLE = (torch.zeros(1, 6, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore:running")
@pytest.mark.parametrize("method", ["auto", "hook"])
def test_the_exact_part_is_the_sum_of_gradients_clipped_one_by_one(method: str) -> None:
    """Against plain backpropagation, record by record."""
    weights = (0.7, 0.4)
    mechanism = dpulr.HiddenDirection(exact=["2", "3", "5"], layer_weights=weights)
    model = boxed()
    fitted = fit(mechanism, model, EXAMPLE, method=method)
    inputs, targets = some()
    expected = 0
    for x, y in zip(inputs, targets, strict=True):
        seen = model[1](model[0](x.unsqueeze(0)).detach())
        loss = LOSS(model[2:](seen), y.unsqueeze(0))[0]
        own = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model[2:].parameters()))])
        expected = expected + own * min(1.0, WITH_MARGIN * weights[1] / float(own.norm()))
    found = torch.cat(parts_of(fitted, inputs, targets)[1:])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:running")
def test_the_hidden_part_is_that_of_the_layer_alone() -> None:
    """With the others frozen, the same directions give the same sum."""
    inputs, targets = some()
    both = fit(
        dpulr.HiddenDirection(exact="auto", repeats=3, layer_weights=(0.7, 0.4)).settled(forward_of(boxed())), boxed(), EXAMPLE
    )
    alone = boxed()
    for module in alone[2:]:
        module.requires_grad_(False)
    single = fit(dpulr.HiddenDirection(repeats=3, layer_weights=(0.7,)), alone, EXAMPLE)
    torch.testing.assert_close(parts_of(both, inputs, targets)[0], parts_of(single, inputs, targets)[0])


def forward_of(model: nn.Module) -> Any:
    return fit(dpulr.HiddenDirection(), model, EXAMPLE).forward


@pytest.mark.filterwarnings("ignore:running")
def test_it_is_one_release_priced_as_a_product() -> None:
    private = engine(
        boxed(), points(dtype=torch.float64), mechanism=dpulr.HiddenDirection(exact="auto", repeats=2), noise_multiplier=2.0
    )
    release = private.plan.step.release
    assert isinstance(release, HiddenDirectionRelease)
    weights = private.fitted.weights
    assert [site.noise_ratio for site in release.sites] == [pytest.approx(2.0 / weights[0])]
    assert release.gaussian == (pytest.approx(2.0 / weights[1]),)
    assert release.numbers == private.fitted.size == 35 + 24 + 8 + 15  # no subspace where the gradient is exact
    assert private.mechanism.passes(private.forward.sites) == 1 + 2
    alone = engine(boxed(), points(dtype=torch.float64), mechanism=dpulr.HiddenDirection(repeats=2), noise_multiplier=2.0)
    assert len(alone.plan.step.release.sites) == 4


def test_automatic_weights_are_public_arithmetic() -> None:
    """The exact layers are clipped together: their gradients' guesses add up in squares. One direction in 5 dimensions sees
    sqrt(1/5) of a gradient."""
    mechanism = dpulr.HiddenDirection(exact=("2", "3", "5"))
    layout = mechanism.layout(fit(mechanism, boxed(), EXAMPLE).forward.sites)
    hidden, exact = layout.weights(50.0)  # so much noise that the hidden direction costs nothing: shares as the guessed gradients
    from dpulr.accounting.small_signal import mean_overlap

    assert exact / hidden == pytest.approx(np.sqrt((5 + 1 + 4) / 6) * mean_overlap(5) * np.sqrt(5), rel=1e-3)


@pytest.mark.parametrize(("width", "repeats"), [(256, 1), (1024, 8), (4096, 8)])
def test_a_wide_hidden_layer_leaves_the_exact_ones_their_share(width: int, repeats: int) -> None:
    """Directions see little of a wide layer's gradient. What the exact layer gets is nearly what it would have alone."""
    model = nn.Sequential(nn.Linear(6, width), Sign(), nn.Linear(width, 3)).double()
    mechanism = dpulr.HiddenDirection(exact=("2",), repeats=repeats)
    release = mechanism.layout(fit(mechanism, model, EXAMPLE).forward.sites).release(1.0)
    assert release.equivalent_noise() > 0.8 * release.gaussian[0]


@pytest.mark.filterwarnings("ignore:running")
def test_a_hidden_layer_beside_exact_ones_steps_in_proportion_to_its_signal() -> None:
    """What noise does to a hidden layer, over what it does to an exact one: the mean overlap; without exact layers, one over it."""
    from dpulr.accounting.small_signal import mean_overlap

    for exact, expected in ((("2", "3", "5"), mean_overlap(5)), ("none", 1 / mean_overlap(5))):
        fitted = fit(dpulr.HiddenDirection(exact=exact, subspace=None), boxed(), EXAMPLE)
        into = [{name: torch.zeros_like(p) for name, p in site.layer.parameters.items()} for site in fitted.sites]
        fitted.lift(torch.ones(fitted.size, dtype=torch.float64), fitted.draw_public(0), into)
        torch.testing.assert_close(into[0]["bias"], torch.full((5,), expected, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:running")
def test_only_what_is_exact_is_ever_recorded() -> None:
    """The box runs on tensors without a history, and without `exact` no gradient is enabled at all."""
    seen: list[bool] = []

    def noted(x: Any) -> Any:
        seen.append(torch.is_grad_enabled())
        return x

    for exact, expected in (("none", {False}), (["2"], {True, False})):
        model = nn.Sequential(nn.Linear(6, 5), NumpyBox(noted), nn.Linear(5, 3))
        private = engine(model, points(600), mechanism=dpulr.HiddenDirection(exact=exact), steps=1)
        seen.clear()
        train(private)
        assert set(seen) == expected


def test_the_differentiated_pass_is_the_clean_one() -> None:
    """What dropout leaves out in the losses' own pass has no slope."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    fitted = fit(dpulr.HiddenDirection(exact=["0", "2"]), model)
    x, y = points(20).tensors
    (clean,) = fitted.forward.clean(x, y, fitted.backward_to)
    assert torch.equal(clean.slopes[0] == 0, clean.calls[1].input == 0)
    assert 0.4 < float((clean.slopes[0] == 0).float().mean()) < 0.6


class RaisesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        if (ctx.saved_tensors[0] > 100).any():
            raise RuntimeError("patient 17")
        return slope


class Fragile(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return RaisesBackward.apply(x)


def test_a_record_whose_backward_pass_raises_adds_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), Fragile(), nn.Linear(5, 3))
    fitted = fit(dpulr.HiddenDirection(exact=["0", "2"]), model)
    x, y = points(8).tensors
    odd = torch.cat([x, 1e6 * x.abs()[:1]])
    torch.testing.assert_close(total(fitted, odd, torch.cat([y, y[:1]])), total(fitted, x, y))


# --- what is refused --------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:running")
def test_bad_input() -> None:
    for wrong, message in (
        ({"exact": "some"}, "exact is 'some'"),
        ({"exact": 3}, "exact is 3"),
        ({"exact": ["1", 2]}, "a list of layers' names"),
        ({"exact": "auto", "last_layer": "exact"}, "not both"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            dpulr.HiddenDirection(**wrong)
    with pytest.raises(InvalidArgument, match=r"names 'head', which is no layer .*there are '0', '2', '3', '5'"):
        engine(boxed(), points(dtype=torch.float64), mechanism=dpulr.HiddenDirection(exact=["head"]))
    with pytest.raises(ModelRefused, match=r"can't be differentiated behind '0' \(Linear\).*exact='auto'"):
        engine(boxed(), points(dtype=torch.float64), mechanism=dpulr.HiddenDirection(exact=["0"]))
    with pytest.raises(InvalidArgument, match="groups is 2, but there are only 1 layers"):
        engine(boxed(), points(dtype=torch.float64), mechanism=dpulr.HiddenDirection(exact="auto", groups=2))
    assert dpulr.HiddenDirection(exact=[]) == dpulr.HiddenDirection()


def test_a_surrogate_is_taken_where_it_is_named() -> None:
    private = engine(around(Spike()), points(600), mechanism=dpulr.HiddenDirection(exact=["2", "4", "6"]), steps=2)
    assert private.notes[0].startswith("Exact by name: the gradient that torch gives for '2' (Linear) is not that of the loss")
    assert train(private) == 2
