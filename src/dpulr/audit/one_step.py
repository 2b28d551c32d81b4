"""The one-step game from start to verdict."""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dpulr import validate
from dpulr.audit import canaries
from dpulr.audit.games import Game, RowsGame, batch_game, single_canary_game
from dpulr.audit.hybrid_game import HybridGame
from dpulr.audit.verdict import Verdict, judge
from dpulr.errors import BudgetError, InvalidArgument
from dpulr.mechanisms import Mechanism, kind_of
from dpulr.model.losses import LossFunction

ROWS_TRIALS, BATCH_TRIALS = 400_000, 10_000


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
        raise BudgetError(f"nothing is claimed: epsilon is infinite at delta {delta:g}. Choose a larger delta.")
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
    per_person: int = 1,
    trials: int | None = None,
    delta: float = 1e-5,
    confidence: float = 0.95,
    seed: int | None = None,
) -> Verdict:
    """Measure a lower bound on epsilon of one release (or of `steps` releases of one model) and hold it against the claim.

    `canary` is "crafted" (the worst case, `dim` dimensions, no other records), a kind made from the data ("ordinary",
    "mislabelled", "large", "feature"), a file, or your own record (x, y). With your own `model`, `loss_fn` and `records` the game
    is played on them; by default on 64 small digits and one layer. With `per_person` people are protected, and the canary is a
    person with so many records. Without `seed` the randomness is the engine's own.
    """
    validate.whole_number("steps", steps)
    validate.whole_number("per_person", per_person)
    validate.positive("noise_multiplier", noise_multiplier)
    if trials is not None:
        check(trials, delta, confidence)
    if dim is not None:
        validate.whole_number("dim", dim)
    worst = kind_of(mechanism).worst_case()
    if canary == "crafted" and worst.canary != "crafted":
        canary, trials = worst.canary, trials or worst.trials
    settings: dict[str, Any] = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate, "steps": steps}
    if per_person > 1:
        settings["per_person"] = per_person
    if canary == "crafted":
        if model is not None or records is not None or rejection_threshold:
            raise InvalidArgument(
                "the crafted canary has a model of its own; give another canary with your model, data or rejection."
            )
        attacked = worst.mechanism if isinstance(mechanism, str) else mechanism
        settings["dim"] = dim or worst.dim
        shared: dict[str, Any] = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate, "steps": steps, "seed": seed}
        shared["per_person"] = per_person
        game: Game
        if attacked.has_exact_part and per_person == 1:
            del shared["per_person"]
            game = HybridGame(attacked, dim=dim or worst.dim, **shared)
        else:
            game = (
                RowsGame(attacked, dim=dim or worst.dim, **shared)
                if worst.many_per_step
                else single_canary_game(attacked, **shared)
            )
        count = trials or worst.trials or ROWS_TRIALS
        return play(game, canary="crafted", trials=count, delta=delta, confidence=confidence, settings=settings)
    if (model is None) != (loss_fn is None) or (records is None) != (model is None):
        raise InvalidArgument("give model, loss_fn and records together.")
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
        per_person=per_person,
    )
    settings["records"] = len(records[1])
    return play(game, canary=name, trials=trials or BATCH_TRIALS, delta=delta, confidence=confidence, settings=settings)


def check(trials: int, delta: float, confidence: float) -> None:
    validate.whole_number("trials", trials, 100)
    validate.fraction("delta", delta)
    validate.fraction("confidence", confidence)
