"""One record changes nothing but its own contribution: every step is recorded, and replayed with one record more.

The pairs are made from fixed seeds. Whoever finds a failing one gets it back by the name of its model and its number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import TensorDataset, default_collate

import dpulr
from dpulr.records import Records
from reproduction import planted_bugs
from tests.privacy.cases import MECHANISMS, MODELS, Fetched, Items, KeepsPositive, Pairs, made, ordinary
from tests.support import zoo
from tests.support.core import LOSS, blobs, engine, mlp, points, small_mlp
from tests.support.own_mechanism import CoordinateDifferences, FittedCoordinates
from tests.support.replaying import Leak, Replay, Replaying, compare

QUICK, SLOW = 13, 440
FEW = 4


def replayed(pairs: Pairs, numbers: range, capfd: pytest.CaptureFixture[str]) -> int:
    """How many pairs were compared."""
    done, largest = 0, 0.0
    for number in numbers:
        replay, data, neighbour, seed, what = pairs.draw(number)
        try:
            shares = compare(replay, data, neighbour, seed)
        except Leak as leak:
            raise Leak(f"{what}: {leak}") from None
        done += 1
        largest = max(largest, *shares.values())
    assert largest > 0.9  # some record does reach its bound: the comparison is not empty
    assert capfd.readouterr() == ("", "")
    return done


@pytest.mark.parametrize("name", MODELS)
def test_one_record_changes_only_its_own_share(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert replayed(Pairs(name, few=FEW), range(QUICK), capfd) == QUICK


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_one_record_changes_only_its_own_share_in_thousands_of_pairs(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert replayed(Pairs(name), range(QUICK, QUICK + SLOW), capfd) == SLOW


def test_these_are_as_many_pairs_as_promised() -> None:
    """And the few mechanisms of each model are all mechanisms together."""
    assert len(MODELS) * QUICK >= 300
    assert len(MODELS) * SLOW >= 10_000
    assert len({number for name in MODELS for number in Pairs(name, few=FEW).mechanisms}) == len(MECHANISMS)
    registered = {kind for kind in dpulr.mechanisms.registry() if kind != "paper"}  # which is not certified
    assert registered == {mechanism.name for mechanism in MECHANISMS}


# --- what is seen when an engine is made ----------------------------------------------------------------------------------------
def made_on(data: Any) -> dict[str, Any]:
    """All that can be seen of making an engine."""
    try:
        private = engine(mlp(), data, sample_rate=0.5, expected_batch_size=10.0, steps=2)
    except Exception as problem:
        return {"error": (type(problem).__name__, str(problem))}
    return {"error": None, "plan": private.plan, "guarantee": private.guarantee, "schema": str(private.records.schema)}


@pytest.mark.parametrize("number", [*range(4), *(pytest.param(number, marks=pytest.mark.slow) for number in range(4, 12))])
def test_an_engine_is_made_alike_with_one_record_more(number: int, recwarn: pytest.WarningsRecorder) -> None:
    """Sampling at a given rate: the size of the data set is private, too. Records as in the replay."""
    pairs = Pairs("mlp", few=1)
    for start in range(10):
        _, data, neighbour, _, _ = pairs.draw(100 * number + start)
        if not isinstance(data, Items):
            continue
        seen = []
        for own in (data, neighbour):
            found = made_on(own)
            if found["error"] is None:
                found["plan"] = vars(found["plan"]) | {"min_dataset_size": None}
            seen.append((found, sorted(str(warning.message) for warning in recwarn)))
            recwarn.clear()
        assert seen[0] == seen[1]


@pytest.mark.parametrize("label", [3, -1])
def test_a_label_out_of_range_is_not_seen_when_an_engine_is_made(label: int) -> None:
    """A record whose loss raises contributes nothing, without a word, before the first step as in a step."""
    x, y = points(30).tensors
    neighbour = TensorDataset(torch.cat([x, x[:1]]), torch.cat([y, torch.tensor([label])]))
    assert made_on(neighbour)["error"] == made_on(TensorDataset(x, y))["error"]


# --- bugs that the replay has found ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["box", "inline box"])
def test_a_record_s_pass_does_not_warn(name: str) -> None:
    """numpy warns of what is not finite, torch of what it runs slowly: which warnings come, and how many, depends on records."""
    rng = np.random.default_rng(0)
    replay = Pairs(name).replay(MECHANISMS.index(dpulr.Gaussian(repeats=2)))
    assert replay is not None
    others = [ordinary(MODELS[name], rng) for _ in range(5)]
    own = others[0][0].clone()
    own[3] = torch.inf
    compare(replay, Items(others), Items([*others, (own, 1)]))


def test_a_gradient_of_another_shape_does_not_raise() -> None:
    """A model that keeps some entries of a record only: its layers' outputs have another shape than the probes' had."""
    others = [(torch.rand(6) + 0.1, i % 3) for i in range(5)]
    torch.manual_seed(0)
    replay = Replay(dpulr.Gradient(), KeepsPositive(), Items(others), loss_fn=LOSS)
    compare(replay, Items(others), Items([*others, (torch.tensor([1.0, -1, 1, 1, 1, 1]), 1)]))


@pytest.mark.parametrize(
    "mechanism", [dpulr.HiddenDirection(repeats=1, exact="auto"), dpulr.HiddenDirection(repeats=1), dpulr.Gradient()], ids=str
)
@pytest.mark.parametrize("first", [True, False])
def test_a_record_of_which_a_model_keeps_nothing_does_not_raise(mechanism: Any, first: bool) -> None:
    """Its layers' outputs have no numbers at all: what is computed of them may divide by their count."""
    others = [(torch.rand(6) + 0.1, i % 3) for i in range(5)]
    own = (torch.full((6,), -1.0), 1)
    torch.manual_seed(0)
    replay = Replay(mechanism, KeepsPositive(), Items(others), loss_fn=LOSS)
    compare(replay, Items(others), Items([*others[:1], own, *others[1:]] if first else [*others, own]))


class _MixingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # type: ignore[override]
        return slope * (50 if len(slope) % 2 else -50)


class MixesBackwards(nn.Module):
    """Records stay apart in the forward pass; the backward pass counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(_MixingBackward.apply(self.first(x)))


@pytest.mark.parametrize(
    "way",
    [
        "auto",
        "hook",
    ],
)
def test_a_backward_pass_that_mixes_records_is_refused_or_harmless(way: Any) -> None:
    """`gradient` runs backward passes, too, and a function of one's own may do anything there. (Tracing leaves it out.)"""
    others = [ordinary(MODELS["mlp"], np.random.default_rng(i)) for i in range(40)]
    torch.manual_seed(0)
    try:
        replay = Replay(dpulr.Gradient(), MixesBackwards(), Items(others[:-1]), loss_fn=LOSS, replay=way)
    except dpulr.errors.ModelRefused:
        return
    compare(replay, Items(others[:-1]), Items(others))


class FittedCarelessly(FittedCoordinates):
    """Runs the model itself: one record's error ends its step, and a model that reads values sees all records at once."""

    def losses(self, weights: dict[str, Tensor], inputs: Any, targets: Any) -> Tensor:
        found: Tensor = self.forward.loss_fn(functional_call(self.forward.model, weights, (inputs,)), targets)
        return found


class Careless(CoordinateDifferences):
    def fit(self, forward: Any, plan: Any, *, memory_limit: int | None, seed: int) -> FittedCarelessly:
        return FittedCarelessly(self, forward, plan, seed)


@pytest.mark.parametrize("odd", ["label", "branch"])
@pytest.mark.parametrize("mechanism", [Careless(coordinates=2), CoordinateDifferences(coordinates=2)], ids=["careless", "careful"])
def test_a_mechanism_from_outside_is_not_certified_if_a_record_can_be_seen(mechanism: Any, odd: str) -> None:
    """The careful one is certified, and one record can't be seen; the careless one is not certified, or can't be seen either."""
    others = [(ordinary(MODELS["mlp"], np.random.default_rng(i))[0] - 1, 1) for i in range(60)]
    model = mlp() if odd == "label" else made("branch")
    replay = Replay(mechanism, model, Items(others), loss_fn=LOSS)
    own = (others[0][0], 7) if odd == "label" else (torch.full((6,), 100.0), 1)
    certified = replay.engine.privacy_spent().guarantee == "certified"
    assert certified or isinstance(mechanism, Careless)
    if certified:
        compare(replay, Items(others), Items([*others, own]))


# --- the replay can fail: bugs that it must find ----------------------------------------------------------------------------------
@contextlib.contextmanager
def promoting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Records as they were read at the reviewed commit: collated at once, by the data set's own way to fetch a batch."""

    def read(records: Records, rows: np.ndarray) -> Any:
        fetch = getattr(records.dataset, "__getitems__", None)
        items = fetch(rows.tolist()) if fetch is not None else [records.dataset[int(row)] for row in rows]
        inputs, targets = default_collate(items)
        return (inputs, targets), rows

    with monkeypatch.context() as patch:
        patch.setattr(Records, "read", read)
        yield


class Centred(Fetched):
    """A batched transform: the mean of the batch is taken off."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        mean = torch.stack([self[row][0] for row in rows]).mean(0)
        return [(self[row][0] - mean, self[row][1]) for row in rows]


def test_it_finds_promoted_types_and_batched_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [(ordinary(MODELS["mlp"], np.random.default_rng(i))[0], 1) for i in range(40)]
    far = (torch.full((6,), 100.0), 1)
    for mechanism in (dpulr.HiddenDirection(), dpulr.Gradient(), dpulr.ZerothOrder(repeats=1)):
        replay = Replay(mechanism, mlp(), Items(others), loss_fn=LOSS)
        compare(replay, Items(others), Items([*others, (others[0][0].double(), 1)]))
        compare(replay, Centred(others), Centred([*others, far]))
        with promoting(monkeypatch):
            with pytest.raises(Leak):
                compare(replay, Items(others), Items([*others, (others[0][0].double(), 1)]))
            with pytest.raises(Leak):
                compare(replay, Centred(others), Centred([*others, far]))


@pytest.mark.parametrize(
    "mechanism",
    [
        planted_bugs.Unclipped(repeats=2),
        planted_bugs.WideBits(),
        planted_bugs.Standardised(repeats=2),
    ],
    ids=lambda mechanism: type(mechanism).__name__,
)
def test_it_finds_planted_bugs(mechanism: Any) -> None:
    others = [ordinary(MODELS["mlp"], np.random.default_rng(i)) for i in range(20)]
    replay = Replay(mechanism, mlp(), Items(others), loss_fn=lambda output, y: 100 * LOSS(output, y))
    with pytest.raises(Leak, match=r"bound|numbers"):
        compare(replay, Items(others), Items([*others, (torch.full((6,), 3.0), 1)]))


class SharedStream(Replaying):
    """What a model draws comes from one seed, row after row: a record more moves the draws of all that follow."""

    @contextlib.contextmanager
    def model_randomness(self, device: torch.device) -> Iterator[None]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            yield


def test_it_finds_a_shared_dropout_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [ordinary(MODELS["dropout"], np.random.default_rng(i)) for i in range(30)]
    data, neighbour = Items(others[:-1]), Items(others)
    replay = Replay(dpulr.Gaussian(repeats=2), made("dropout"), data, loss_fn=LOSS, random_model=True)
    compare(replay, data, neighbour)
    monkeypatch.setattr("tests.support.replaying.Replaying", SharedStream)
    replay = Replay(dpulr.Gaussian(repeats=2), made("dropout"), data, loss_fn=LOSS)
    with pytest.raises(Leak, match="bound"):
        compare(replay, data, neighbour)


class Talks(zoo.Refuses):
    def forward(self, x: Tensor) -> Tensor:
        if (x > 10).any():
            print("a large one")
        return x


def test_it_finds_what_is_printed_and_what_is_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = blobs(6).tensors
    data, neighbour = TensorDataset(x[:5], y[:5]), TensorDataset(torch.cat([x[:5], 0 * x[:1] + 1e3]), y)
    talking = Replay(dpulr.Gaussian(repeats=1), nn.Sequential(Talks(), *small_mlp()), data, loss_fn=LOSS)
    with pytest.raises(Leak, match="printed"):
        compare(talking, data, neighbour)
    replay = Replay(dpulr.Gaussian(repeats=1), small_mlp(), data, loss_fn=LOSS)
    compare(replay, data, neighbour)
    read = Records.read

    def picky(records: Records, rows: np.ndarray) -> Any:
        if len(rows) > 5:
            raise OSError("patient 17")
        return read(records, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Records, "read", picky)
        with pytest.raises(Leak, match="patient 17"):
            compare(replay, data, neighbour)
