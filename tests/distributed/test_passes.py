"""`parallel="passes"`: all ranks take the same batch, and share the repeats and layers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpulr
from dpulr.distributed.ranks import digest_of
from dpulr.randomness import Directions
from tests.support.core import engine, mlp, points, train
from tests.support.processes import on_ranks
from tests.support.replaying import RecordDirections, Replaying

MECHANISM = dpulr.HiddenDirection(repeats=5, subspace=None, last_layer="exact")


def one_record(rank: int, record: int, repeats: int) -> tuple[Tensor, Tensor, int]:
    """What one record alone adds to a release, of all ranks and of this one; the bounds; the repeats that this rank has drawn."""
    source, settings = Replaying(), {"sample_rate": 1.0, "expected_batch_size": 1.0, "noise_multiplier": 1e-4}
    mechanism = dpulr.HiddenDirection(repeats=repeats, subspace=None, last_layer="exact", layer_weights=(1.0, 1.0))
    data = torch.utils.data.Subset(points(37), [record])
    private = engine(mlp(), data, mechanism=mechanism, randomness=source, parallel="passes", **settings)
    source.follow(private)
    seen: list[Tensor] = []
    private.on_release(lambda released: seen.append(released.values))
    train(private, 1)
    parts = [
        float(part.norm()) / weight for part, weight in zip(private.fitted.parts(seen[0]), private.fitted.weights, strict=True)
    ]
    return seen[0], parts, sum(source.own_directions.drawn.values())


def several(rank: int, repeats: int) -> list[Any]:
    return [one_record(rank, record, repeats) for record in (0, 3)]


def test_the_ranks_share_the_repeats_and_a_record_keeps_its_bound() -> None:
    """Five repeats on three ranks: 2, 2 and 1. With directions by record all ranks draw the same ones, which is the worst case."""
    found = on_ranks(3, several, 5)
    dims = 5  # of the hidden layer; the last one is exact
    for i in range(2):
        assert [of_rank[i][2] for of_rank in found] == [2 * dims, 2 * dims, dims]
        assert all(torch.equal(of_rank[i][0], found[0][i][0]) for of_rank in found)
        assert max(found[0][i][1]) <= 1


class ByLayer(RecordDirections):
    """Directions that belong to a record and a layer, told by its dimensions, whatever was drawn before."""

    def _of_records(self, repeats: int, records: int, dim: int) -> Tensor:
        self._dim = dim
        return super()._of_records(repeats, records, dim)

    def _stream(self, key: bytes) -> Any:
        return super()._stream(key + bytes([self._dim]))


class ByLayerReplaying(Replaying):
    def directions(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Directions:
        self.own_directions = ByLayer(device, dtype)
        return self.own_directions


def three_layers(rank: int, mechanism: Any) -> tuple[Tensor, list[int], bool]:
    """The sum over 37 records without noise; the repeats of each layer that this rank has taken; whether it has the exact one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    source = ByLayerReplaying()
    rates = {"sample_rate": 1.0, "expected_batch_size": 37.0, "noise_multiplier": 1e-4}
    private = engine(model, points(37), mechanism=mechanism, randomness=source, parallel="passes", **rates)
    source.follow(private)
    seen: list[Tensor] = []
    private.on_release(lambda released: seen.append(released.values))
    train(private, 1)
    return seen[0], private.fitted._own_repeats, private.fitted._owns_exact


@pytest.mark.parametrize(
    ("size", "last_layer", "kappa", "repeats"),
    [
        (2, "hidden", None, [[1, 0, 1], [0, 1, 0]]),
        (3, "hidden", "adaptive", [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
        (3, "exact", None, [[1, 0], [0, 1], [0, 0]]),
        (3, "exact", "adaptive", [[1, 0], [0, 1], [0, 0]]),
    ],
)
def test_the_layers_are_dealt_out_and_add_up_to_the_sum_of_one_process(
    size: int, last_layer: Any, kappa: Any, repeats: Any
) -> None:
    """Votes about scales included: of a record, one rank votes about each."""
    mechanism = dpulr.HiddenDirection(repeats=1, subspace=None, last_layer=last_layer, kappa=kappa)
    found = on_ranks(size, three_layers, mechanism)
    expected = three_layers(0, mechanism)[0]
    assert expected.norm() > 0.1
    assert [own for _, own, _ in found] == repeats
    assert [exact for *_, exact in found].index(True) == (size - 1 if last_layer == "exact" else 3 % size)
    for values, *_ in found:
        assert (values - expected).abs().max() < 1e-6 * max(1.0, float(expected.norm()))


def test_repeats_and_layers_are_dealt_out_together() -> None:
    """Three repeats of three layers on two ranks, which draw the same: two repeats here, one there, of each layer in turn."""
    found = on_ranks(2, three_layers, dpulr.HiddenDirection(repeats=3, subspace=None))
    assert [own for _, own, _ in found] == [[2, 1, 2], [1, 2, 1]]
    assert torch.equal(found[0][0], found[1][0])


def batches(rank: int, steps: int) -> list[list[float]]:
    private = engine(mlp(), points(37), mechanism=MECHANISM, parallel="passes", batch_size=10, steps=steps)
    found = []
    for inputs, targets in private.batches():
        found.append(inputs[:, 0].tolist())
        private.step(inputs, targets)
    assert private.guarantee == "certified"
    return [*found, [float(int(digest_of(private.model.parameters())[:8], 16))]]


@pytest.mark.slow
def test_all_ranks_take_the_same_secret_batches() -> None:
    found = on_ranks(2, batches, 6)
    assert found[0] == found[1]
    assert len({tuple(batch) for batch in found[0]}) == 7
    assert found[0] != on_ranks(2, batches, 6)[0]


@pytest.mark.parametrize("mechanism", ["gaussian", "gradient", "zeroth-order"])
def test_mechanisms_that_bound_all_passes_together_are_refused(mechanism: str) -> None:
    found = on_ranks(2, lambda rank: engine(mechanism=mechanism, parallel="passes"))
    assert all("what single ones say must not leave" in said.text for said in found)


def test_too_few_passes_are_refused() -> None:
    found = on_ranks(3, lambda rank: engine(mechanism=dpulr.HiddenDirection(repeats=1), parallel="passes"))
    assert "deals 1 repeats of 2 layers to 3 ranks" in found[0].text
    with pytest.raises(ValueError, match="sharded must be False"):
        engine(sharded=True, parallel="passes")
    assert math.isfinite(engine(mechanism=MECHANISM, parallel="passes").sample_rate)  # alone, nothing changes
