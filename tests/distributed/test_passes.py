"""`parallel="passes"`: all ranks take the same batch, and share the repeats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import dpulr
from dpulr.distributed.ranks import digest_of
from tests.support.core import engine, mlp, points, train
from tests.support.processes import on_ranks
from tests.support.replaying import Replaying

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


def test_one_repeat_each_adds_up_to_the_sum_of_one_process() -> None:
    """Where each of two ranks has one repeat, and both draw the same, the sum is that of one process with one repeat."""
    shared = on_ranks(2, several, 2)
    for i, record in enumerate((0, 3)):
        alone = one_record(0, record, 1)
        exact = 5 * 3 + 3
        assert torch.allclose(shared[0][i][0][:-exact], alone[0][:-exact], atol=1e-6)


def batches(rank: int, steps: int) -> list[list[float]]:
    private = engine(mlp(), points(37), mechanism=MECHANISM, parallel="passes", batch_size=10, steps=steps)
    found = []
    for inputs, targets in private.batches():
        found.append(inputs[:, 0].tolist())
        private.step(inputs, targets)
    assert private.guarantee == "certified"
    return [*found, [float(int(digest_of(private.model.parameters())[:8], 16))]]


def test_all_ranks_take_the_same_secret_batches() -> None:
    found = on_ranks(2, batches, 6)
    assert found[0] == found[1]
    assert len({tuple(batch) for batch in found[0]}) == 7
    assert found[0] != on_ranks(2, batches, 6)[0]


@pytest.mark.parametrize("mechanism", ["gaussian", "gradient", "zeroth-order"])
def test_mechanisms_that_bound_all_passes_together_are_refused(mechanism: str) -> None:
    found = on_ranks(2, lambda rank: engine(mechanism=mechanism, parallel="passes"))
    assert all("what single ones say must not leave" in said.text for said in found)


def test_too_few_repeats_are_refused() -> None:
    found = on_ranks(2, lambda rank: engine(mechanism="hidden-direction", parallel="passes"))
    assert "shares 1 repeats among 2 ranks" in found[0].text
    with pytest.raises(ValueError, match="sharded must be False"):
        engine(sharded=True, parallel="passes")
    assert math.isfinite(engine(mechanism=MECHANISM, parallel="passes").sample_rate)  # alone, nothing changes
