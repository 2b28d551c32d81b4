"""The `zeroth-order` mechanism against a slow, literal version of it; its bound; its cost; where its randomness comes from."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr import accounting
from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.mechanisms.zeroth_order import _WITH_MARGIN as WITH_MARGIN
from dpulr.mechanisms.zeroth_order import FittedZerothOrder
from dpulr.model.moved_weights import Direction, Moved
from dpulr.randomness import RandomSource
from tests.support import zoo
from tests.support.core import LOSS, accuracy, engine, fit, gradient, normed_mlp, points, rounded, total, train


class Branching(nn.Module):
    """Reads values, so that it has to run on one record at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x.relu() if x.sum().item() > 0 else x.tanh())


class Moody(nn.Module):
    """A black box that raises on some records."""

    def forward(self, x: Tensor) -> Tensor:
        if np.abs(x.numpy()).max() > 50:
            raise RuntimeError("out of range")
        return x


def engine_for(model: nn.Module, records: TensorDataset, settings: dpulr.ZerothOrder, **more: Any) -> dpulr.PrivacyEngine:
    options = {"batch_size": 5, "steps": 1, "noise_multiplier": 0.7, "seed": 4} | more
    return engine(model, records, learning_rate=1.0, mechanism=settings, **options)


def fitted_to(
    model: nn.Module | None = None, settings: dpulr.ZerothOrder | None = None, loss_scale: float = 1.0
) -> FittedZerothOrder:
    example = (torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64))
    model = normed_mlp() if model is None else model
    return fit(settings or dpulr.ZerothOrder(repeats=4), model, example, loss_fn=lambda out, y: LOSS(out, y) * loss_scale)


# --- one step, literally --------------------------------------------------------------------------------------------------
def literal_gradient(model: nn.Module, records: TensorDataset, settings: dpulr.ZerothOrder, *, rate: float, seed: int) -> Tensor:
    """The step as section 4 of the theory says it, record by record: the flat gradient, with noise 0.7 c."""
    source = RandomSource(seed)
    coins = source.numpy("batches")
    rows = coins.choice(len(records), coins.binomial(len(records), rate), replace=False)
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    public = torch.Generator().manual_seed(4)
    seeds = torch.randint(2**63 - 1, (settings.repeats,), generator=public).tolist()
    directions = [torch.randn(sum(sizes), generator=torch.Generator().manual_seed(s)) for s in seeds]
    if settings.directions == "sphere":
        directions = [z / z.norm() * math.sqrt(len(z)) for z in directions]

    def loss(row: int, z: Tensor) -> float:
        x, y = records[row]
        with torch.no_grad():
            for p, part in zip(parameters, torch.split(z, sizes), strict=True):
                p += part.view_as(p)
            value = LOSS(model(x.unsqueeze(0)), y.unsqueeze(0)).item()
            for p, part in zip(parameters, torch.split(z, sizes), strict=True):
                p -= part.view_as(p)
        return value

    total = np.zeros(settings.repeats)
    for row in rows:
        r = settings.radius
        slopes = np.array([(loss(row, r * z) - loss(row, -r * z)) / (2 * r) for z in directions])
        total += slopes * min(1, WITH_MARGIN * settings.max_grad_norm / np.linalg.norm(slopes))
    total += 0.7 * settings.max_grad_norm * source.numpy("noise").standard_normal(settings.repeats)
    total = rounded(total, 0.7 * settings.max_grad_norm) / (rate * len(records))
    return sum(s * z for s, z in zip(total, directions, strict=True)) / math.sqrt(settings.repeats * sum(sizes))


@pytest.mark.parametrize("make", [normed_mlp, Branching])
@pytest.mark.parametrize(
    "settings",
    [
        dpulr.ZerothOrder(repeats=3, radius=0.1, max_grad_norm=0.6),
        dpulr.ZerothOrder(repeats=1, radius=0.05, max_grad_norm=100.0, directions="sphere"),
    ],
    ids=["clipped", "sphere"],
)
@pytest.mark.filterwarnings("ignore:running records one by one")
def test_a_step_is_what_the_theory_says(make: Any, settings: dpulr.ZerothOrder) -> None:
    torch.manual_seed(0)
    model, records = make(), points(10, 5)
    expected = literal_gradient(model, records, settings, rate=0.5, seed=12)
    train(engine_for(model, records, settings, insecure_noise_seed=12))
    torch.testing.assert_close(gradient(model), expected.float(), rtol=1e-4, atol=1e-4)


# --- a record's bound -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4, 1e30])
def test_no_record_exceeds_the_bound(scale: float) -> None:
    fitted = fitted_to(settings=dpulr.ZerothOrder(repeats=4, max_grad_norm=0.3), loss_scale=scale)
    x, y = points(10, 5).tensors
    norms = [total(fitted, x[i : i + 1], y[i : i + 1]).norm().item() for i in range(len(x))]
    assert max(norms) <= 0.3
    assert scale != 1e4 or min(norms) > 0.2996  # what is too long is scaled, not dropped
    assert scale != 1e-3 or max(norms) < 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_adds_nothing(bad: float) -> None:
    x, y = points(3, 5).tensors
    x[1, 2] = bad
    everyone, others, alone = (total(fitted_to(), x[rows], y[rows]) for rows in ([0, 1, 2], [0, 2], [1]))
    if math.isnan(bad):
        torch.testing.assert_close(everyone, others)
        assert not alone.any()
    else:  # tanh makes something finite of it, which is clipped like anything else
        assert (everyone - others).norm() <= 1
        assert alone.norm() <= 1


def test_a_record_that_raises_adds_nothing_and_is_not_named() -> None:
    model = nn.Sequential(nn.Linear(5, 4), Moody(), nn.Linear(4, 3))
    x, y = points(3, 5).tensors
    x[1] *= 1e4
    everyone, others = (total(fitted_to(model), x[rows], y[rows]) for rows in ([0, 1, 2], [0, 2]))
    torch.testing.assert_close(everyone, others, rtol=1e-3, atol=1e-4)  # differences of losses amplify rounding
    assert everyone.any()


# --- what it costs --------------------------------------------------------------------------------------------------------
def test_epsilon_is_that_of_the_gaussian_mechanism_whatever_the_repeats() -> None:
    for repeats in (1, 50):
        settings = dpulr.ZerothOrder(repeats=repeats)
        private = engine_for(normed_mlp(), points(10, 5), settings, noise_multiplier=3.0, steps=4)
        train(private)
        spent = private.privacy_spent()
        assert spent.guarantee == "certified"
        ideal = accounting.gaussian_epsilon(noise_multiplier=3.0, sample_rate=0.5, steps=4, delta=1e-5)
        assert ideal < spent.epsilon < 1.0001 * ideal  # the rounding of so few numbers costs hardly anything


def test_the_statement_names_the_mechanism_that_ran() -> None:
    private = engine_for(normed_mlp(), points(10, 5), dpulr.ZerothOrder(repeats=2), steps=2)
    train(private)
    spent = private.privacy_spent()
    assert spent.mechanism == "zeroth-order"
    assert "after 2 steps of the zeroth-order mechanism" in str(spent)
    assert "gaussian" not in str(spent)


def test_noise_does_not_come_from_the_public_seed() -> None:
    """Two engines with the same seed share directions and start; only the secret noise makes their first steps differ."""
    grads, seeds = [], []
    for _ in range(2):
        model = normed_mlp()
        options = {"expected_batch_size": 1.0, "sample_rate": 1.0, "batch_size": None}
        private = engine_for(model, points(10, 5), dpulr.ZerothOrder(repeats=2), **options)
        private.on_release(lambda released: seeds.append(released.public))
        train(private)
        grads.append(gradient(model))
    assert seeds[0] == seeds[1]
    z = torch.zeros(2, private.fitted.dim)
    for number, part in zip(seeds[0], z, strict=True):
        private.fitted.direction(number).add_to(part, 0, 1.0)
    difference = grads[0] - grads[1]
    assert difference.norm() > 1e-3
    inside = torch.linalg.lstsq(z.t(), difference.unsqueeze(1)).solution
    torch.testing.assert_close(z.t() @ inside, difference.unsqueeze(1), rtol=1e-4, atol=1e-5)  # same public directions


# --- training -------------------------------------------------------------------------------------------------------------
def test_the_model_keeps_its_weights_while_a_step_looks_around() -> None:
    fitted = fitted_to()
    before = [p.detach().clone() for p in fitted.forward.model.parameters()]
    total(fitted, *points(10, 5).tensors)
    assert all(torch.equal(a, b) for a, b in zip(before, fitted.forward.model.parameters(), strict=True))


def test_it_learns() -> None:
    """Three well separated classes; the seed is fixed, and 0.9 lies far below what a run reaches."""
    torch.manual_seed(1)
    y = torch.arange(600) % 3
    records = TensorDataset(torch.randn(600, 5) * 0.3 + 2 * torch.eye(3, 5)[y], y)
    model = nn.Sequential(nn.Linear(5, 3))
    settings: dict[str, Any] = {"batch_size": 200, "steps": 80, "noise_multiplier": 1.0, "insecure_noise_seed": 3}
    train(engine(model, records, learning_rate=1.0, mechanism="zeroth-order", **settings))
    assert accuracy(model, records) > 0.9


# --- settings -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats is 0; it must be a whole number"),
        ({"radius": -1.0}, "radius is -1.0; it must be a finite number of at least 0.0005"),
        ({"max_grad_norm": math.nan}, "max_grad_norm is nan"),
        ({"directions": "cube"}, "directions is 'cube'; it must be 'normal' or 'sphere'"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        dpulr.ZerothOrder(**options)


# --- the published family, large models -------------------------------------------------------------------------------------
def test_presets_are_the_published_methods() -> None:
    assert dpulr.ZerothOrder.dpzero() == dpulr.ZerothOrder(repeats=1, directions="sphere")
    assert dpulr.ZerothOrder.dp_aggzo(directions=256).repeats == 256
    assert dpulr.ZerothOrder.dp_zo() == dpulr.ZerothOrder(repeats=1)
    assert dpulr.ZerothOrder.dp_zo(noise="laplace", max_grad_norm=2.0).noise == "laplace"
    with pytest.raises(InvalidArgument, match="Laplace noise bounds a single number"):
        dpulr.ZerothOrder(repeats=2, noise="laplace")


def test_laplace_noise_gives_pure_epsilon_and_lies_on_the_grid() -> None:
    settings = dpulr.ZerothOrder.dp_zo(noise="laplace", max_grad_norm=0.5)
    private = engine_for(
        normed_mlp(), points(10, 5), settings, target_epsilon=2.0, target_delta=0.0, noise_multiplier=None, steps=3
    )
    released: list[float] = []
    private.on_release(lambda seen: released.append(seen.values.item()))
    train(private)
    spent = private.privacy_spent()
    rate, scale = 0.5, private.noise_multiplier
    assert spent.epsilon == pytest.approx(3 * math.log(1 + rate * math.expm1(1 / scale)), rel=1e-5)
    assert 1.99 < spent.epsilon <= 2.0
    assert spent.delta == 0
    assert private.privacy_spent(delta=1e-5).pure_epsilon == spent.epsilon
    cells = [value / (0.5 * 2**-20) for value in released]
    assert all(cell == round(cell) for cell in cells)


def test_a_laplace_step_is_what_the_theory_says() -> None:
    settings = dpulr.ZerothOrder.dp_zo(noise="laplace", max_grad_norm=0.3)
    fitted = fitted_to(settings=settings)
    x, y = points(3, 5).tensors
    public = fitted.draw_public(0)
    exact = sum(total(fitted, x[i : i + 1], y[i : i + 1], public=public).item() for i in range(3))
    noise = RandomSource(5).laplace_noise(1, fitted.scale).draw()
    released = fitted.privatise(total(fitted, x, y, public=public), noise)
    assert released.item() - noise.item() * fitted.cell == pytest.approx(exact, abs=2e-5)
    assert fitted.scale * fitted.cell == pytest.approx(0.3)


class Raw(nn.Module):
    """Parameters held by the model itself, shared between two uses, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.unused = nn.Parameter(torch.randn(5, 5) / 3), nn.Parameter(torch.zeros(2))
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = (x @ self.table).unsqueeze(1)
        return self.head(self.attention(x, x, x, need_weights=False)[0].squeeze(1) @ self.table.t())


@pytest.mark.parametrize("in_place", [False, True])
def test_any_module_is_moved_without_a_copy_of_its_weights(in_place: bool) -> None:
    """Operation by operation, and in place: the same losses, those of a literally moved model. The weights stay, bit for bit."""
    fitted = fitted_to(Raw())
    assert not fitted._in_place
    fitted._in_place = in_place
    before = [p.detach().clone() for p in fitted.parameters.values()]
    x, y = points(4, 5).tensors
    direction = fitted.direction(3)
    with torch.inference_mode():
        found = fitted.losses(fitted.direction(3), 0.2, x, y)
    assert all(torch.equal(a, b) for a, b in zip(before, fitted.parameters.values(), strict=True))
    moved = Raw()
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            direction.add_to(parameter.data, fitted.offsets[fitted.parameters[name]], 0.2)
        torch.testing.assert_close(found, LOSS(moved(x), y))


def test_a_module_that_hides_its_weights_is_moved_in_place() -> None:
    class Hides(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 3)
            self.same_memory = [self.weight.data]

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x, self.same_memory[0])

    fitted = fitted_to(nn.Sequential(Hides()))
    assert fitted._in_place
    assert total(fitted, *points(4, 5).tensors).any()


def test_directions_are_the_same_in_any_order_and_of_unit_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpulr.model.moved_weights.BLOCK", 1_000)
    for sphere in (False, True):
        make = partial(Direction, 7, 5_300, torch.float32, torch.device("cpu"), sphere=sphere)
        whole = torch.zeros(5_300)
        make().add_to(whole, 0, 1.0)
        parts, direction = torch.zeros(5_300), make()
        for start, stop in ((2_500, 5_300), (0, 999), (999, 2_500)):
            direction.add_to(parts[start:stop], start, 1.0)
        torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0)
        assert whole.square().mean().item() == pytest.approx(1.0, abs=1e-5 if sphere else 0.05)


def test_of_a_table_only_the_rows_that_are_looked_up_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get what the whole table would get, across the blocks of a direction; bit for bit, whichever others there are."""
    monkeypatch.setattr("dpulr.model.moved_weights.BLOCK", 1_000)
    table, offset = nn.Parameter(torch.randn(700, 7, generator=torch.Generator().manual_seed(0))), 333
    direction = Direction(7, 5_300, torch.float32, torch.device("cpu"))
    literal = table.detach().clone()
    direction.add_to(literal, offset, 0.3)
    index = torch.randint(0, 700, (40, 5), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), Moved({table: offset}, direction, 0.3):
        found = nn.functional.embedding(index, table)
        alone = [nn.functional.embedding(row, table) for row in (*index, torch.arange(700), torch.tensor([], dtype=torch.long))]
    torch.testing.assert_close(found, literal[index])
    torch.testing.assert_close(alone[40], literal)
    assert torch.equal(torch.stack(alone[:40]), found)
    assert torch.equal(alone[40][index], found)
    assert alone[41].shape == (0, 7)


def test_large_models_are_updated_group_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights as with all gradients at once, which are never there together."""
    weights = []
    for block in (2**20, 16):
        monkeypatch.setattr("dpulr.mechanisms.zeroth_order.BLOCK", block)
        model = normed_mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        private = engine(model, points(10, 5), mechanism="zeroth-order", batch_size=5, insecure_noise_seed=2, optimizer=optimizer)
        train(private)
        assert len(private._updates.groups) == (1 if block == 2**20 else 3)
        assert block == 2**20 or sum(p.grad is not None for p in model.parameters()) <= 2
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights)


def test_padding_is_not_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3, padding_idx=0), nn.Flatten(), nn.Linear(6, 3))
    before = model[0].weight.detach().clone()
    records = TensorDataset(torch.randint(0, 4, (10, 2)), torch.arange(10) % 3)
    train(engine(model, records, mechanism="zeroth-order", batch_size=5))
    assert (model[0].weight != before).any(1).tolist() == [False, True, True, True]


def test_bfloat16_passes_keep_a_record_to_itself() -> None:
    fitted = fitted_to(settings=dpulr.ZerothOrder(repeats=3, radius=0.1, precision="bfloat16"))
    x, y = points(8, 5).tensors
    public = fitted.draw_public(0)
    together = total(fitted, x, y, public=public)
    alone = sum(total(fitted, x[i : i + 1], y[i : i + 1], public=public) for i in range(8))
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)  # bit for bit, but for the float64 sum
    full = total(fitted_to(settings=dpulr.ZerothOrder(repeats=3, radius=0.1)), x, y, public=public)
    assert 0 < (full - together).norm() < 0.2 * full.norm()


# --- can the noise be subtracted? -------------------------------------------------------------------------------------------
def subtracted(released: Tensor, seeds: list[int], fitted: FittedZerothOrder, exact: Tensor) -> bool:
    """The attack on published code: the noise was drawn from the generator that had just been seeded for the public direction.

    Tries every seed that is public and small ones, before and after the direction's own draws.
    """
    for seed in [*seeds, *range(2_000)]:
        for skipped in (0, fitted.dim):
            for dtype in (torch.float32, torch.float64):
                generator = torch.Generator().manual_seed(seed)
                torch.randn(skipped, generator=generator)
                noise = torch.randn(fitted.size, generator=generator, dtype=dtype).double() * fitted.noise_std
                if (released - noise - exact).norm() < 0.02 * fitted.noise_std:
                    return True
    return False


@pytest.mark.parametrize("planted", [False, True])
def test_an_attacker_who_searches_the_seed_does_not_find_the_noise(planted: bool) -> None:
    fitted = fitted_to(settings=dpulr.ZerothOrder(repeats=8))
    x, y = points(4, 5).tensors
    seeds = fitted.draw_public(0)
    exact = total(fitted, x, y, public=seeds)
    noise = RandomSource().noise(8).draw()
    if planted:
        generator = torch.Generator().manual_seed(seeds[-1])
        torch.randn(fitted.dim, generator=generator)
        noise = torch.randn(8, generator=generator).double()
    assert subtracted(fitted.privatise(exact.clone(), noise), seeds, fitted, exact) == planted


def test_a_model_that_takes_no_half_precision_is_refused_by_name() -> None:
    with pytest.raises(ModelRefused, match=r"does not run in bfloat16 \(TypeError: .*leave out precision="):
        fit(dpulr.ZerothOrder(repeats=1, precision="bfloat16"), zoo.BoxInside())
