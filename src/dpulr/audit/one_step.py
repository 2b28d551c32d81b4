"""The one-step game from start to verdict."""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpulr.arguments import positive, whole
from dpulr.audit import canaries
from dpulr.audit.games import BatchGame, Game, LossFunction, RowsGame, ZerothOrderGame, linear_loss
from dpulr.audit.verdict import Verdict, judge
from dpulr.mechanisms import Gaussian, HiddenDirection, Mechanism, Paper, ZerothOrder, by_name

ROWS_TRIALS, BATCH_TRIALS, PAPER_TRIALS = 400_000, 10_000, 2_000


def play(
    game: Game,
    *,
    canary: str,
    trials: int,
    delta: float = 1e-5,
    confidence: float = 0.95,
    settings: dict[str, Any] | None = None,
) -> Verdict:
    """Play a game `trials` times with the canary and `trials` times without, and judge its claim."""
    check(trials, delta, confidence)
    if math.isinf(game.claim.epsilon(delta)):
        raise ValueError(f"nothing is claimed: epsilon is infinite at delta {delta:g}. Choose a larger delta.")
    started = time.perf_counter()
    with warnings.catch_warnings():  # said by `paper` at every canary that is simulated alone
        warnings.filterwarnings("ignore", message="the batch's gradients have no noise")
        out, inside = game.features(trials)
    return judge(
        out,
        inside,
        game.attacks(),
        game.claim,
        mechanism=game.mechanism,
        canary=canary,
        delta=delta,
        confidence=confidence,
        game=game.name,
        settings=settings,
        seconds=time.perf_counter() - started,
    )


def one_step(
    mechanism: str | Mechanism = "hidden-direction",
    canary: str | Path | tuple[Tensor, Tensor] = "crafted",
    *,
    noise_multiplier: float = 1.0,
    sample_rate: float = 1.0,
    steps: int = 1,
    dim: int | None = None,
    model: nn.Module | None = None,
    loss_fn: LossFunction | None = None,
    records: tuple[Tensor, Tensor] | None = None,
    rejection_threshold: int = 0,
    trials: int | None = None,
    delta: float = 1e-5,
    confidence: float = 0.95,
    seed: int | None = None,
) -> Verdict:
    """Measure a lower bound on epsilon of one release (or of `steps` releases of one model) and hold it against the claim.

    `canary` is "crafted" (the worst case, `dim` dimensions, no other records), a kind made from the data ("ordinary",
    "mislabelled", "large", "feature"), a file, or your own record (x, y). With your own `model`, `loss_fn` and `records` the game
    is played on them; by default on 64 small digits and one layer. Without `seed` the randomness is the engine's own.
    """
    whole("steps", steps)
    positive("noise_multiplier", noise_multiplier)
    if trials is not None:
        check(trials, delta, confidence)
    if dim is not None:
        whole("dim", dim)
    settings: dict[str, Any] = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate, "steps": steps}
    if canary == "crafted" and mechanism != "opacus" and isinstance(by_name(mechanism), Paper):
        canary = "feature"  # its noise depends on the whole batch: nothing hurts it more than a feature that nobody else has
        trials = trials or PAPER_TRIALS
    game: Game
    if canary == "crafted":
        if model is not None or records is not None or rejection_threshold:
            raise ValueError("the crafted canary has a model of its own; give another canary with your model, data or rejection.")
        dim = dim or (1 if _one_direction(mechanism) else 16)
        settings["dim"] = dim
        shared: dict[str, Any] = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate, "steps": steps, "seed": seed}
        if mechanism == "opacus":
            from reproduction.opacus_game import OpacusGame

            game = OpacusGame(dim=dim, **shared)
        elif isinstance(by_name(mechanism), ZerothOrder):
            game = lone(ZerothOrder(repeats=1) if mechanism == "zeroth-order" else mechanism, **shared)
            trials = trials or BATCH_TRIALS
        else:
            game = RowsGame(whole_space(mechanism), dim=dim, **shared)
        return play(game, canary="crafted", trials=trials or ROWS_TRIALS, delta=delta, confidence=confidence, settings=settings)
    if mechanism == "opacus":
        raise ValueError("Opacus is audited with the crafted canary only.")
    if (model is None) != (loss_fn is None) or (records is None) != (model is None):
        raise ValueError("give model, loss_fn and records together.")
    if model is None or records is None:
        inputs, targets = canaries.digits()
        model, records, ordinary = canaries.softmax_regression(), (inputs[:-1], targets[:-1]), (inputs[-1], targets[-1])
    else:
        ordinary = (records[0][-1], records[1][-1])
        records = (records[0][:-1], records[1][:-1])
    if isinstance(canary, tuple):
        own, name = canary, "your own"
    elif isinstance(canary, str) and canary in canaries.KINDS:
        own, name = canaries.make(canary, ordinary), canary
    else:
        own, name = canaries.load(Path(canary)), f"your own ({Path(canary).name})"
    game = batch_game(mechanism)(
        mechanism,
        model=model,
        loss_fn=loss_fn or nn.CrossEntropyLoss(reduction="none"),
        records=records,
        canary=own,
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        rejection_threshold=rejection_threshold,
        steps=steps,
        seed=seed,
    )
    settings["records"] = len(records[1])
    return play(game, canary=name, trials=trials or BATCH_TRIALS, delta=delta, confidence=confidence, settings=settings)


def batch_game(mechanism: str | Mechanism) -> type[BatchGame]:
    return ZerothOrderGame if isinstance(by_name(mechanism), ZerothOrder) else BatchGame


def lone(mechanism: str | Mechanism, *, slope: float = 1e4, **options: Any) -> BatchGame:
    """A canary with a linear loss, in one dimension, beside one record whose loss is always 0."""
    return batch_game(mechanism)(
        mechanism,
        model=nn.Sequential(nn.Linear(1, 1, bias=False)),
        loss_fn=linear_loss,
        records=(torch.ones(1, 1), torch.zeros(1, 1)),
        canary=(torch.ones(1), torch.full((1,), slope)),
        **options,
    )


def check(trials: int, delta: float, confidence: float) -> None:
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 100:
        raise ValueError(f"trials is {trials!r}; it must be a whole number of at least 100.")
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta!r}; it must lie between 0 and 1.")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence!r}; it must lie between 0 and 1.")


def whole_space(mechanism: str | Mechanism) -> str | Mechanism:
    """The crafted canary needs no public subspace: by name, hidden-direction hides in all dimensions here."""
    return HiddenDirection(subspace=None) if mechanism == "hidden-direction" else mechanism


def _one_direction(mechanism: str | Mechanism) -> bool:
    """A clipped estimate in one dimension always has the same direction: no attack has it easier."""
    return mechanism == "opacus" or isinstance(by_name(mechanism), Gaussian | ZerothOrder)
