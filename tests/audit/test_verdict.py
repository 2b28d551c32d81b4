"""Verdicts: words, JSON, pictures, the command line, and how often a true claim is refuted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dpulr.accounting import GaussianRelease, SampledStep
from dpulr.accounting.rounding import down, up
from dpulr.audit import Verdict, attacks, draw
from dpulr.audit.claims import Claim, refuted
from dpulr.audit.verdict import _proof, judge
from dpulr.cli.main import main


def features(values: np.ndarray) -> np.ndarray:
    return np.stack([values, np.zeros_like(values)], axis=-1)[:, None, :]


def verdict(seed: int, count: int, *, shift: float = 1.0, claimed: float = 1.0, confidence: float = 0.95) -> Verdict:
    rng = np.random.default_rng(seed)
    out, inside = rng.standard_normal(count), rng.standard_normal(count) + shift
    return judge(
        features(out),
        features(inside),
        [attacks.projection(), attacks.quadratic()],
        Claim(SampledStep(GaussianRelease(claimed), 1.0)),
        mechanism="gaussian",
        canary="crafted",
        confidence=confidence,
    )


@pytest.mark.slow
def test_a_true_claim_is_seldom_refuted() -> None:
    """At confidence 0.8, 25 times: at most 20 % on average. False alarm 5e-4."""
    assert sum(verdict(seed, 600, confidence=0.8).broken for seed in range(25)) <= 12


def test_a_false_claim_is_refuted() -> None:
    found = verdict(1, 20_000, shift=2.0)
    assert found.broken
    assert found.noise_factor == pytest.approx(0.5, rel=0.1)
    assert found.proof is not None
    assert str(found) == f"BROKEN: claims {up(found.proof[1], 3)} at delta {found.proof[0]:.3g}, at least {down(found.proof[2])}"


def test_no_noise_at_all() -> None:
    """Scores without any spread: ties must not hide the difference."""
    out, inside = features(np.zeros(1_000)), features(np.ones(1_000))
    claim = Claim(SampledStep(GaussianRelease(4.0), 1.0))
    found = judge(out, inside, [attacks.projection(), attacks.quadratic()], claim, mechanism="m", canary="c")
    assert found.broken
    assert found.lower_bound > 4
    assert found.noise_factor == 1 / 16
    assert found.curve_bound == Claim(SampledStep(GaussianRelease(0.25), 1.0)).epsilon(1e-5)  # not infinite: that was not measured
    assert "less was not tried" in found.details()


def test_one_direction_of_the_curve_alone_breaks_nothing() -> None:
    """Rates that the accountant's curve for added records forbids, while every claimed (epsilon, delta) allows them."""
    claim = Claim(SampledStep(GaussianRelease(1.0), 0.1))
    fpr, tpr = np.array([1 - 0.001]), np.array([1 - 0.0008])
    assert (refuted(claim, fpr, tpr) > 0).all()
    assert _proof(claim, fpr, tpr, 1e-5) is None
    assert _proof(claim, np.array([0.001]), np.array([0.05]), 0.5) is not None  # at a smaller delta than the one asked for


def test_nothing_to_see() -> None:
    same = features(np.zeros(1_000))
    found = judge(same, same, [attacks.projection()], Claim(SampledStep(GaussianRelease(4.0), 1.0)), mechanism="m", canary="c")
    assert not found.broken
    assert found.measured == 0


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["audit", "--mechanism", "gaussian", "--trials", "20000", "--seed", "1", "--output", str(tmp_path / "a")]
    assert main([*options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"].startswith("holds (measured ")
    assert printed == json.loads((tmp_path / "a" / "verdict.json").read_text())
    assert (tmp_path / "a" / "verdict.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_a_refuted_claim_has_an_exit_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--mechanism", "paper", "--noise-multiplier", "4", "--trials", "100", "--seed", "1"]) == 4
    assert capsys.readouterr().out.startswith("BROKEN: nominally claims 0.927, at least ")
    assert main(["audit", "--game", "randomness", "--seed", "1"]) == 0
    assert "as the proofs assume" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        ["--mechanism", "nothing"],
        ["--canary", "nothing"],
        ["--game", "nothing"],
        ["--trials", "3"],
        ["--trials", "0"],
        ["--game", "randomness", "--confidence", "2"],
        ["--game", "randomness", "--trials", "500"],
        ["--delta", "2"],
        ["--noise-multiplier", "nan"],
        ["--sample-rate", "0"],
        ["--game", "many-runs", "--dim", "3"],
    ],
)
def test_wrong_usage(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *wrong]) == 2
    assert capsys.readouterr().err.startswith("dpulr: ")


def test_picture(tmp_path: Path) -> None:
    assert draw(verdict(1, 1_000), tmp_path / "folder" / "v.svg").read_text().startswith("<?xml")
