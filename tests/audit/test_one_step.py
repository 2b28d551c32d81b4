"""The one-step game: tight where theory says so, never above the claim, the same by both ways of playing it.

Confidence is 0.95 for each verdict, but seeds are fixed: a failure is a change, not chance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from torch import nn

import dpulr
from dpulr.audit import BatchGame, RowsGame
from dpulr.audit.games import linear_loss, single_canary_game
from dpulr.audit.verdict import judge
from dpulr.mechanisms import kind_of
from dpulr.mechanisms.base import WITH_MARGIN


@pytest.mark.parametrize(
    ("mechanism", "dim", "noise", "trials"),
    [
        pytest.param("gaussian", 1, 1.0, 400_000, marks=pytest.mark.slow),
        pytest.param("hidden-direction", 10, 1.0, 600_000, marks=pytest.mark.slow),
        pytest.param("hidden-direction", 128, 0.5, 300_000, marks=pytest.mark.slow),
    ],
)
def test_tight_for_the_worst_case(mechanism: str, dim: int, noise: float, trials: int) -> None:
    """At least 80 % of the claim: at delta 1e-5 by its curve, at delta 0.01 whatever the truth is."""
    game = RowsGame(kind_of(mechanism).worst_case().mechanism, dim=dim, noise_multiplier=noise, seed=3)
    out, inside = game.features(trials)
    curve, plain = (
        judge(out, inside, game.attacks(), game.claim, mechanism=mechanism, canary="crafted", delta=delta) for delta in (1e-5, 0.01)
    )
    assert not curve.broken
    assert not plain.broken
    assert 0.8 * curve.claimed_epsilon < curve.curve_bound < curve.claimed_epsilon
    assert 0.8 * plain.claimed_epsilon < plain.lower_bound < plain.claimed_epsilon
    assert str(curve).startswith("holds (measured ")


@pytest.mark.parametrize("mechanism", ["gaussian", "hidden-direction"])
@pytest.mark.slow
def test_sampling_and_several_steps(mechanism: str) -> None:
    verdict = dpulr.audit.one_step(mechanism, noise_multiplier=0.5, sample_rate=0.2, steps=3, trials=20_000, seed=1)
    assert not verdict.broken
    assert verdict.measured > 0.3 * verdict.claimed_epsilon


@pytest.mark.slow
def test_zeroth_order() -> None:
    verdict = dpulr.audit.one_step("zeroth-order", trials=500, seed=1)
    assert not verdict.broken
    assert verdict.measured > 0.6 * verdict.claimed_epsilon


@pytest.mark.slow
def test_many_games_in_one_step_are_the_same_as_one_game_per_step() -> None:
    """Kolmogorov-Smirnov on what the attacker projects on, with and without the canary; false alarm 4 * 0.001."""
    rows = RowsGame(dpulr.HiddenDirection(repeats=1, subspace=None), dim=4, noise_multiplier=0.5, seed=1, sample_rate=0.7)
    batches = BatchGame(
        dpulr.HiddenDirection(repeats=1, subspace=None),
        model=nn.Sequential(nn.Linear(1, 4, bias=False)),
        loss_fn=linear_loss,
        records=(torch.ones(1, 1), torch.zeros(1, 4)),
        canary=(torch.ones(1), torch.tensor([1e4, 0, 0, 0])),
        noise_multiplier=0.5,
        sample_rate=0.7,
        seed=2,
    )
    assert rows.claim.epsilon(1e-5) == pytest.approx(batches.claim.epsilon(1e-5), rel=0.02)  # but for rounding: it has more numbers
    many = next(iter(rows.releases()))
    few = [
        np.concatenate(parts) for parts in zip(*(pair for pair, _ in zip(batches.releases(), range(12), strict=False)), strict=True)
    ]
    for a, b in zip(many, few, strict=True):
        assert ks_2samp(a[:, 0, 0], b[:, 0, 0]).pvalue > 0.001
        assert ks_2samp((a**2).sum(-1).ravel(), (b**2).sum(-1).ravel()).pvalue > 0.001


def test_rows_do_not_touch_each_other() -> None:
    """A row's release is its own canary's: the right means, and neighbouring rows uncorrelated (5 standard errors)."""
    game = RowsGame("gaussian", dim=1, noise_multiplier=1.0, seed=4)
    out, inside = next(iter(game.releases()))
    assert inside.mean() == pytest.approx(1.0, abs=5 / np.sqrt(len(inside)))
    assert out.mean() == pytest.approx(0.0, abs=5 / np.sqrt(len(out)))
    assert abs(np.corrcoef(inside[:-1, 0, 0], inside[1:, 0, 0])[0, 1]) < 5 / np.sqrt(len(inside))


@pytest.mark.parametrize(
    "canary", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("ordinary", "large")), "mislabelled", "feature"]
)
@pytest.mark.slow
def test_canaries_among_digits(canary: str) -> None:
    verdict = dpulr.audit.one_step("gaussian", canary, noise_multiplier=0.3, trials=100, seed=1)
    assert not verdict.broken
    assert verdict.canary == canary


@pytest.mark.slow
def test_your_own_canary_model_and_data(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    nn.init.zeros_(model[0].weight)
    records = (torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(10, dtype=torch.int64))
    own = (torch.tensor([9.0, 0.0, 0.0]), torch.tensor(1))
    options: dict[str, Any] = {"noise_multiplier": 0.4, "trials": 100, "seed": 1}
    verdict = dpulr.audit.one_step(
        "gaussian", own, model=model, loss_fn=nn.CrossEntropyLoss(reduction="none"), records=records, **options
    )
    assert not verdict.broken
    assert verdict.measured > 1
    assert verdict.canary == "your own"
    np.savez(tmp_path / "c.npz", x=np.full((28, 28), 0.5, dtype=np.float32), y=3)
    torch.save({"x": torch.full((49,), 0.5), "y": 3}, tmp_path / "c.pt")
    for name in ("c.npz", "c.pt"):
        assert dpulr.audit.one_step("gaussian", tmp_path / name, **options).canary == f"your own ({name})"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"canary": "nothing"}, "neither a kind"),
        ({"trials": 10}, "at least 100"),
        ({"delta": 0.0}, "delta is 0.0"),
        ({"confidence": 1.0}, "confidence is 1.0"),
        ({"steps": 0}, "steps is 0"),
        ({"dim": 0}, "dim is 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier is -1.0"),
        ({"mechanism": "nothing"}, "mechanism is 'nothing'"),
        ({"rejection_threshold": 3}, "model of its own"),
        ({"canary": "large", "model": nn.Linear(1, 1)}, "together"),
        ({"canary": (torch.ones(3), torch.tensor(1)), "mechanism": "gaussian"}, "a record of the data has"),
    ],
)
def test_refused_in_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dpulr.audit.one_step(**options)


def test_a_damaged_canary_is_named(tmp_path: Path) -> None:
    for name, content in (("a.npz", b"nothing"), ("b.pt", b"nothing")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            dpulr.audit.one_step("gaussian", tmp_path / name)
    np.savez(tmp_path / "n.npz", x=np.full(49, np.nan), y=3)
    with pytest.raises(ValueError, match="not finite"):
        dpulr.audit.one_step("gaussian", tmp_path / "n.npz")


@pytest.mark.slow
def test_rejection_is_in_the_claim() -> None:
    options: dict[str, Any] = {"sample_rate": 0.5, "noise_multiplier": 1.0, "trials": 100, "seed": 1, "delta": 0.3}
    free = dpulr.audit.one_step("gaussian", "large", **options)
    costly = dpulr.audit.one_step("gaussian", "large", rejection_threshold=30, **options)
    assert costly.claimed_epsilon > free.claimed_epsilon
    assert not costly.broken


def test_the_single_canary_is_clipped_to_the_bound() -> None:
    game = single_canary_game("gaussian", noise_multiplier=1.0, seed=1)
    assert np.abs(game.signals()) == pytest.approx(WITH_MARGIN, abs=2**-10)  # the grid on which sums are released


@pytest.mark.parametrize(
    ("mechanism", "dim"),
    [
        pytest.param(dpulr.HiddenDirection(repeats=1, subspace=None), 10, marks=pytest.mark.slow),
        pytest.param(dpulr.HiddenDirection(repeats=1, subspace=None, exact="auto"), 1, marks=pytest.mark.slow),
        pytest.param(dpulr.HiddenDirection(repeats=1, subspace=None, exact="auto"), 10, marks=pytest.mark.slow),
        (dpulr.Gradient(), 1),
    ],
    ids=["hidden", "hybrid, 1 dimension", "hybrid, 10 dimensions", "gradient"],
)
def test_hidden_and_exact_parts_are_tight_on_the_worst_case(mechanism: Any, dim: int) -> None:
    """At delta 0.01 no shape of the curve is assumed. Fixed seed; a true claim is refuted with probability 0.05 over seeds."""
    verdict = dpulr.audit.one_step(mechanism, noise_multiplier=0.7, dim=dim, trials=40_000, delta=1e-2, seed=1)
    assert not verdict.broken
    assert max(verdict.lower_bound, verdict.curve_bound) > 0.8 * verdict.claimed_epsilon
