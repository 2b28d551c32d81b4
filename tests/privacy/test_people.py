"""One person changes nothing but his or her own bounded share: every sum with a person more, and without.

Randomness belongs to places in the batch, and the person who comes or goes is the last: so all others keep theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.accounting.events import HiddenDirectionRelease
from dpulr.mechanisms.base import WITH_MARGIN
from dpulr.model import sites
from dpulr.model.people import People
from dpulr.randomness import Directions
from tests.privacy.cases import MODELS, Items, made, odd_kinds, odd_values, ordinary
from tests.support.core import CPU, LOSS, all_kinds, engine, mlp, points
from tests.support.replaying import Leak, Replay, compare

MOST = 4
TOLERANCE = 1e-6
MECHANISMS = [
    dpulr.HiddenDirection(repeats=1),
    dpulr.HiddenDirection(repeats=3, antithetic=True, subspace=None),
    dpulr.HiddenDirection(repeats=1, kappa=0.05, groups=1),
    dpulr.HiddenDirection(repeats=1, last_layer="exact", subspace=2),
    dpulr.HiddenDirection(repeats=1, exact="auto"),
    dpulr.HiddenDirection(repeats=1, space="weight"),
    dpulr.Gaussian(repeats=2),
    dpulr.Gaussian(repeats=2, clipping="per-layer", max_grad_norm=0.3, subspace=2),
    dpulr.Gradient(),
    dpulr.Gradient(clipping="normalised"),
    dpulr.ZerothOrder(repeats=3),
]
ODD = (1.0, 1e4, math.nan, math.inf, 0.0, -1e20)


class PlaceDirections(Directions):
    """The numbers of a place in the batch, whoever else is in it."""

    def __init__(self) -> None:
        super().__init__(np.random.default_rng(0), CPU, torch.float32)
        self._calls = 0

    def expect(self, sizes: Sequence[int]) -> None:
        """Nothing is drawn ahead."""

    def normal(self, *shape: int) -> Tensor:
        self._calls += 1
        repeats, places, dim = shape
        numbers = [np.random.default_rng([self._calls, i]).standard_normal((repeats, dim), dtype=np.float32) for i in range(places)]
        return torch.from_numpy(np.stack(numbers, axis=1) if numbers else np.empty((repeats, 0, dim), np.float32))

    def spheres(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        drawn = [self.normal(*shape) for shape in shapes]
        return [z / torch.linalg.vector_norm(z, dim=-1, keepdim=True) for z in drawn]


def engine_of(mechanism: Any, model: nn.Module, **settings: Any) -> dpulr.PrivacyEngine:
    data = points(40)
    usual: dict[str, Any] = {"expected_batch_size": 8.0, "sample_rate": 0.5, "steps": 3, "noise_multiplier": 1.0}
    return engine(model, data, mechanism=mechanism, unit=np.arange(40) // 3, max_per_person=MOST, **{**usual, **settings})


def total(private: dpulr.PrivacyEngine, x: Tensor, y: Tensor, owners: Sequence[int], public: Any) -> Tensor:
    people = People.of(np.array(owners, dtype=np.int64), MOST, CPU)
    with torch.inference_mode(), private.forward.checked_mode():
        summed: Tensor = private.fitted.sum_over_people((x, y), people, public, PlaceDirections())
    return summed.double()


def shares(private: dpulr.PrivacyEngine, difference: Tensor) -> list[float]:
    """The difference of two sums, part by part, over the bound that the charged release states."""
    fitted, step = private.fitted, private.plan.step
    assert step is not None
    assert step.unit == "person"
    if not isinstance(step.release, HiddenDirectionRelease):
        return [float(difference.norm()) / (fitted.noise_std / step.release.equivalent_noise())]
    ratios = [site.noise_ratio for site in step.release.sites] + list(step.release.gaussian)
    parts = fitted.parts(difference)  # type: ignore[attr-defined]
    groups = fitted.layout.groups  # type: ignore[attr-defined]
    return [
        float(torch.cat([parts[i] for i in group]).norm()) / (fitted.noise_std / ratio)
        for group, ratio in zip(groups, ratios, strict=True)
    ]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
@pytest.mark.parametrize("make", [mlp, pytest.param(all_kinds, marks=pytest.mark.slow)])
def test_a_person_changes_each_sum_by_at_most_the_bound(mechanism: Any, make: Any) -> None:
    private = engine_of(mechanism, make())
    rng = np.random.default_rng(5)
    others = [person for person, size in enumerate(rng.integers(1, MOST + 1, 6)) for _ in range(size)]
    x, y = (part[: len(others)] for part in points(40).tensors)
    public = private.fitted.draw_public(0)
    without, largest = total(private, x, y, others, public), 0.0
    assert torch.isfinite(without).all()
    for size in (1, 2, MOST):
        for scale in ODD:
            own = scale * torch.randn(size, 6, generator=torch.Generator().manual_seed(size))
            own[1:] = own[1:].nan_to_num(0, 0, 0)  # of a person's records, some are odd
            joined = torch.cat([x, own]), torch.cat([y, torch.arange(size) % 3])
            found = shares(private, total(private, *joined, [*others, *[99] * size], public) - without)
            assert max(found) <= 1 + TOLERANCE, (size, scale, found)
            largest = max(largest, *found)
    assert largest > (0.2 if isinstance(mechanism, dpulr.HiddenDirection) else 0.9)  # the mean of random vectors is short


def test_a_person_s_equal_records_weigh_no_more_than_one() -> None:
    """Exact gradients: the mean of equal records is one of them."""
    private = engine_of(dpulr.Gradient(max_grad_norm=0.5), mlp())
    x, y = (part[:1] for part in points(40).tensors)
    public = private.fitted.draw_public(0)
    one, four = (total(private, x.expand(n, 6), y.expand(n), [0] * n, public) for n in (1, MOST))
    assert torch.allclose(one, four, atol=1e-6)


def test_hidden_direction_is_the_literal_one() -> None:
    """One direction over all records of a person, one bit of the mean loss, and a joint gain, in a loop."""
    settings = dpulr.HiddenDirection(repeats=2, subspace=None, radius=0.2)
    model = nn.Sequential(nn.Linear(6, 3))
    private = engine_of(settings, model)
    x, y = (part[:5] for part in points(40).tensors)
    owners = [0, 0, 1, 1, 1]
    found = total(private, x, y, owners, private.fitted.draw_public(0))
    (z,) = PlaceDirections().spheres([(2, 2, MOST * 3)])
    (weight,) = private.fitted.weights  # type: ignore[attr-defined]
    expected = torch.zeros(3, 7, dtype=torch.float64)
    with torch.no_grad():
        for person, rows in enumerate([[0, 1], [2, 3, 4]]):
            gain = math.sqrt(sum(float(x[i] @ x[i]) + 1 for i in rows))
            for k in range(2):
                blocks = z[k, person].view(MOST, 3)
                length = 0.2 * math.sqrt(MOST * 3)
                output = model(x[rows])
                moved = LOSS(output + length * blocks[: len(rows)], y[rows]).mean() - LOSS(output, y[rows]).mean()
                for i, block in zip(rows, blocks, strict=False):
                    own = torch.outer(block, torch.cat([x[i], torch.ones(1)])).double()
                    expected += float(moved.sign()) * WITH_MARGIN * weight / gain / 2 * own
    assert torch.allclose(found, torch.cat([expected[:, :6].flatten(), expected[:, 6]]), atol=1e-6)


def test_a_person_s_mean_gradient_is_clipped_as_one() -> None:
    settings = dpulr.Gradient(max_grad_norm=0.2)
    model = mlp()
    private = engine_of(settings, model)
    x, y = (part[:5] for part in points(40).tensors)
    found = total(private, x, y, [0, 0, 1, 1, 1], private.fitted.draw_public(0))
    expected = torch.zeros_like(found)
    for rows in ([0, 1], [2, 3, 4]):
        model.zero_grad()
        LOSS(model(x[rows]), y[rows]).mean().backward()
        own = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]).double()
        expected += own * min(1.0, WITH_MARGIN * 0.2 / float(own.norm()))
    assert torch.allclose(found, expected, atol=1e-6)


# --- the others, bit for bit ----------------------------------------------------------------------------------------------------
class Refuses(nn.Module):
    """A black box that raises for a record above 1e9."""

    def forward(self, x: Tensor) -> Tensor:
        if (x.numpy() > 1e9).any():
            raise KeyError("patient 17")
        return x


def steep() -> nn.Module:
    """On records of size 1e7 its losses are so large that what a perturbation changes is less than their last bit."""
    torch.manual_seed(0)
    return nn.Sequential(Refuses(), nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


BAD: dict[str, tuple[float, int]] = {
    "an ordinary one": (1e7, 1),
    "a label that does not exist": (1e7, 7),
    "a record that raises": (1e12, 1),
    "not a number": (math.nan, 1),
    "infinite": (math.inf, 1),
    "minus infinite": (-math.inf, 1),
    "huge": (3e38, 1),
    "tiny": (1e-44, 1),
    "zeros": (0.0, 1),
}


def others_and(bad: str, people: int, size: int) -> tuple[Tensor, Tensor, list[int], int]:
    """Records of so many people, and behind them those of one more, of whom the last record is bad; and how many are theirs."""
    generator, value = torch.Generator().manual_seed(people), BAD[bad]
    owners = [person for person in range(people) for _ in range(1 + person % MOST)]
    x = 1e7 * torch.randn(len(owners) + size, 6, generator=generator)
    with torch.no_grad():
        y = steep()[1:](x).argmin(1)
    x[-1], y[-1] = value[0], value[1]
    return x, y, [*owners, *[people] * size], len(owners)


def shares_of_rows(private: dpulr.PrivacyEngine, batch: Any, owners: list[int], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What each record, or person, adds to a release, before it is summed: the inputs of a layer and its bounded signals."""
    found: list[Tensor] = []
    with monkeypatch.context() as patch:
        for kind in (sites.OutputSite, sites.WeightSite):

            def noted(site: Any, call: Any, signal: Tensor, scale: Tensor, *rest: Any, own: Any = kind.add, **named: Any) -> None:
                found.append(torch.cat([call.input.flatten(1), signal * scale.unsqueeze(1)], dim=1))
                own(site, call, signal, scale, *rest, **named)

            patch.setattr(kind, "add", noted)
        if isinstance(private.mechanism, dpulr.ZerothOrder):
            clipped = private.fitted.clipped  # type: ignore[attr-defined]
            patch.setattr(private.fitted, "clipped", lambda *args: found.append(clipped(*args)) or found[-1])
        total(private, *batch, owners, shares_of_rows.public.setdefault(private, private.fitted.draw_public(0)))
    return found


shares_of_rows.public = {}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "mechanism", [pytest.param(m, marks=() if i % 5 == 0 else pytest.mark.slow) for i, m in enumerate(MECHANISMS)], ids=str
)
def test_a_bad_record_leaves_the_others_bit_for_bit(mechanism: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding 12. Where a pass raised, each person was run alone, by other kernels: signs turned, and moved sums by many C."""
    private = engine_of(mechanism, steep())
    for people, size in ((1, 1), (7, 2)):
        for bad in BAD:
            x, y, owners, theirs = others_and(bad, people, size)
            alone = shares_of_rows(private, (x[:theirs], y[:theirs]), owners[:theirs], monkeypatch)
            joined = shares_of_rows(private, (x, y), owners, monkeypatch)
            kept = people if isinstance(mechanism, dpulr.ZerothOrder) else theirs
            assert len(alone) == len(joined) > 0
            for before, after in zip(alone, joined, strict=True):
                assert before[:kept].abs().sum() > 0
                assert torch.equal(before[:kept].nan_to_num(17), after[:kept].nan_to_num(17)), (bad, people, size)


# --- whole steps, replayed ------------------------------------------------------------------------------------------------------
class OfPeople(Items):
    """Records and whose they are."""

    def __init__(self, people: Sequence[Sequence[Any]]) -> None:
        super().__init__([record for person in people for record in person])
        self.owners = [number for number, person in enumerate(people) for _ in person]


REPLAYED = ("mlp", "raises", "raises inside", "convolution", "all kinds", "branch", "dropout")
QUICK, SLOW = 4, 160


def pair_of(name: str, number: int) -> tuple[int, int | None, OfPeople, OfPeople]:
    """A mechanism, the size of parts, people, and the same with one more, who has any number of records of any kind."""
    case, rng = MODELS[name], np.random.default_rng([number, *name.encode()])

    def record(odd: float) -> Any:
        if rng.random() >= odd:
            return ordinary(case, rng)
        return odd_values(case, rng) if rng.random() < 0.6 else odd_kinds(case, rng)

    def person(odd: float, most: int = MOST) -> list[Any]:
        return [record(odd) for _ in range(rng.integers(1, most + 1))]

    others = [[ordinary(case, rng), *person(0.2, MOST - 1)], *[person(0.2) for _ in range(rng.integers(6))]]
    place = 1 + int(rng.integers(len(others)))
    joined = [*others[:place], person(0.7, MOST + 2), *others[place:]]  # of more than MOST, some are drawn
    return int(rng.integers(len(MECHANISMS))), (None, 3)[rng.integers(2)], OfPeople(others), OfPeople(joined)


def replayed(name: str, numbers: range) -> None:
    replays: dict[int, Replay | None] = {}
    for number in numbers:
        mechanism, parts, data, neighbour = pair_of(name, number)
        if mechanism not in replays:
            random, unit = MODELS[name].random, {"unit": data.owners, "max_per_person": MOST}
            try:
                replays[mechanism] = Replay(MECHANISMS[mechanism], made(name), data, loss_fn=LOSS, random_model=random, **unit)
            except dpulr.errors.ModelRefused:  # a box has no gradient
                replays[mechanism] = None
        replay = replays[mechanism]
        if replay is None:
            continue
        replay.in_parts_of(parts)
        try:
            compare(replay, data, neighbour, number)
        except Leak as leak:
            raise Leak(f"{name}, pair {number}, {MECHANISMS[mechanism]}: {leak}") from None


@pytest.mark.parametrize("name", REPLAYED)
def test_one_person_changes_only_his_or_her_own_share(name: str) -> None:
    replayed(name, range(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLAYED)
def test_one_person_changes_only_his_or_her_own_share_in_a_thousand_pairs(name: str) -> None:
    assert len(REPLAYED) * SLOW >= 1_000
    replayed(name, range(QUICK, QUICK + SLOW))


# --- engines ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mechanism", ["hidden-direction", "gaussian", "gradient", "zeroth-order"])
def test_a_run_states_people(mechanism: str) -> None:
    private = engine_of(mechanism, mlp(), batch_size=7, expected_batch_size=None, sample_rate=None)
    assert private.sample_rate == 7 / 14
    for batch in private.batches():
        assert len(batch[1]) <= 14 * MOST
        private.step(*batch)
    spent = private.privacy_spent()
    assert spent.guarantee == "certified"
    assert "adding or removing one person with all of their records" in str(spent)
    assert "the number of people (14)" in str(spent)


def test_no_step_takes_more_of_a_person_than_allowed() -> None:
    y = points(40).tensors[1]
    data = TensorDataset(torch.arange(40.0).unsqueeze(1).expand(40, 6).clone(), y)
    owners = np.where(np.arange(40) < 20, 0, np.arange(40))
    seen: list[set[float]] = []
    private = engine(
        mlp(), data, unit=owners, max_per_person=3, mechanism="gradient", steps=40, noise_multiplier=1.0, sample_rate=1.0,
        expected_batch_size=20.0,
    )  # fmt: skip
    for batch in private.batches():
        first = [value for value in batch[0][:, 0].tolist() if value < 20]
        assert len(first) == len(set(first)) == 3
        assert len(batch[1]) == 23
        seen.append(set(first))
        private.step(*batch)
    assert len(set.union(*seen)) == 20  # 40 draws of 3 out of 20 miss one of them with probability below 0.03


def test_one_record_per_person_is_for_every_mechanism() -> None:
    private = engine_of(dpulr.HiddenDirection(repeats=1), mlp(), sample_rate=1.0)
    settings: dict[str, Any] = {"mechanism": "hidden-direction", "steps": 1, "sample_rate": 1.0, "expected_batch_size": 5.0}
    single = engine(mlp(), points(40), unit=np.arange(40) // 3, max_per_person=1, **settings)
    assert len(next(single.batches(1))[1]) == 14
    assert private.mechanism.per_person == MOST  # type: ignore[attr-defined]
    assert single.mechanism.per_person == 1  # type: ignore[attr-defined]
    with pytest.raises(dpulr.errors.InvalidArgument, match="paper bounds single records"):
        engine(mlp(), points(40), unit=np.arange(40), mechanism="paper", steps=1, noise_multiplier=4.0, batch_size=20)
