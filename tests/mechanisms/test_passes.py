"""The forward passes that a mechanism states are those that a step takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpulr
from dpulr.mechanisms import Mechanism
from dpulr.model.prepare import prepare
from tests.support.core import CPU, LOSS, engine, named, points
from tests.support.own_mechanism import CoordinateDifferences


class Tally:
    """A number that is none of the model's state: what a pass writes into a module is put back after it."""

    def __init__(self) -> None:
        self.rows = 0


class Counted(nn.Module):
    """Counts the rows that pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()

    def forward(self, x: Tensor) -> Tensor:
        self.tally.rows += x.shape[0]
        return x


def model() -> nn.Sequential:
    """Four layers behind a counter, the last of 3 outputs."""
    torch.manual_seed(0)
    return nn.Sequential(
        Counted(), nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 5), nn.PReLU(), nn.Linear(5, 3), nn.Flatten(), nn.LayerNorm(3)
    )


HIDDEN, GAUSSIAN, PAPER = dpulr.HiddenDirection, dpulr.Gaussian, dpulr.Paper
CASES: list[tuple[Mechanism, int]] = [
    (HIDDEN(repeats=1), 1 + 5),
    (HIDDEN(repeats=3), 1 + 3 * 5),
    (HIDDEN(repeats=1, antithetic=True), 1 + 2 * 5),
    (HIDDEN(repeats=3, antithetic=True), 1 + 2 * 3 * 5),
    (HIDDEN(repeats=1, groups=2), 1 + 2),
    (HIDDEN(groups=1, repeats=4, antithetic=True), 1 + 2 * 4),
    (HIDDEN(repeats=1, subspace=None, kappa=1.0), 1 + 5),
    (HIDDEN(repeats=1, last_layer="exact", space="output"), 1 + 4 + 2 * 3),
    (HIDDEN(last_layer="exact", space="output", repeats=2, groups=2, antithetic=True), 1 + 2 * 2 * 2 + 2 * 3),
    (GAUSSIAN(repeats=3), 1 + 2 * 3 * 5),
    (GAUSSIAN(repeats=3, estimator="baseline"), 1 + 3 * 5),
    (GAUSSIAN(repeats=3, estimator="likelihood-ratio", subspace=2), 1 + 3 * 5),
    (dpulr.ZerothOrder(repeats=3), 2 * 3),
    (PAPER(repeats=3), 1 + 3 * 5),
    (PAPER(repeats=3, remedy="extra-noise"), 1 + 3 * 5),
    (PAPER(repeats=3, remedy="parameters"), 1 + 3 * 5),
    (PAPER(repeats=3, simultaneous=True), 1 + 3),
    (CoordinateDifferences(coordinates=4), 2 * 4),
]


def built(mechanism: Mechanism) -> nn.Sequential:
    """Where outputs are perturbed, every layer must have an output space: PReLU has none."""
    return nn.Sequential(*[nn.Linear(5, 5) if isinstance(m, nn.PReLU) and mechanism.space == "output" else m for m in model()])


@pytest.mark.parametrize(
    ("mechanism", "passes"), CASES, ids=lambda value: named(value) if isinstance(value, Mechanism) else str(value)
)
@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_passes_are_what_a_step_takes(mechanism: Mechanism, passes: int) -> None:
    """Whole passes (no replay from a layer on), so that every one of them goes through the counter."""
    counted = built(mechanism)
    private = engine(counted, points(30), mechanism=mechanism, replay="hook", batch_size=15, steps=1)
    assert mechanism.passes(private.forward.sites) == passes
    batch = next(private.batches())
    assert len(batch[0]) > 0
    sizes = private.fitted.rows
    assert sizes is None or sizes.largest > 0  # tried by passes of their own
    counted[0].tally.rows = 0
    private.step(*batch)
    rows = len(batch[0]) if sizes is None else sizes.of(len(batch[0]))
    assert counted[0].tally.rows == passes * rows


@pytest.mark.parametrize("mechanism", [HIDDEN(repeats=2), HIDDEN(repeats=2, antithetic=True), GAUSSIAN(repeats=2)], ids=named)
def test_a_memory_limit_splits_passes_but_adds_none(mechanism: Mechanism) -> None:
    counted = built(mechanism)
    private = engine(counted, points(60), mechanism=mechanism, replay="hook", batch_size=50, steps=1, memory_limit=30_000)
    batch = next(private.batches())
    rows = private.fitted.rows
    sizes = [rows.of(len(part[0])) for part, _ in private.fitted.chunks.parts(batch, None, rows.largest)]
    assert len(sizes) > 1
    counted[0].tally.rows = 0
    private.step(*batch)
    assert counted[0].tally.rows == mechanism.passes(private.forward.sites) * sum(sizes)


def test_one_sided_costs_about_half() -> None:
    sites = prepare(model(), LOSS, (torch.zeros(1, 6), torch.zeros(1).long()), CPU).sites
    for settings in ({"repeats": 8}, {"repeats": 8, "groups": 2}):
        one, two = (HIDDEN(**settings, antithetic=both).passes(sites) for both in (False, True))
        assert 2 * (one - 1) == two - 1


@pytest.mark.parametrize("repeats", [(1, 2, 3, 4, 5), {0: 1, 3: 2}, lambda step, layer: 1 + step], ids=["layer", "step", "call"])
def test_passes_that_vary_are_not_stated(repeats: Any) -> None:
    sites = prepare(model(), LOSS, (torch.zeros(1, 6), torch.zeros(1).long()), CPU).sites
    assert PAPER(repeats=repeats).passes(sites) is None
