"""Whole training runs: one run with many canaries (Steinke, Nasr, Jagielski 2023), or many runs with and without one.

The attacker sees the model at the start and at the end, nothing between.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

from dpulr import validate
from dpulr.audit import canaries as kinds
from dpulr.audit.bounds import Array, epsilon_from_guesses
from dpulr.audit.claims import Claim
from dpulr.audit.games import BatchGame, Table, engine_claim, linear_loss, signal_of
from dpulr.audit.one_step import check, play
from dpulr.audit.verdict import Verdict, allowed, rates
from dpulr.engine import PrivacyEngine
from dpulr.errors import InvalidArgument
from dpulr.mechanisms import Mechanism, kind_of
from dpulr.model.losses import LossFunction
from dpulr.randomness import RandomSource

_SHARES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)  # of the canaries that the attacker guesses about


# --- one run ----------------------------------------------------------------------------------------------------------
def one_run(
    mechanism: str | Mechanism = "hidden-direction",
    canary: str = "crafted",
    *,
    canaries: int = 2_000,
    noise_multiplier: float = 1.0,
    sample_rate: float = 0.1,
    steps: int = 20,
    dim: int = 16,
    learning_rate: float = 0.1,
    delta: float = 1e-5,
    confidence: float = 0.95,
    seed: int | None = None,
) -> Verdict:
    """Train once, with each of many canaries in or out by a coin, and guess from the trained model which were in.

    "crafted": each canary has a row of the model to itself. "mislabelled": digits with a wrong label among 2,000 others.
    """
    check(canaries, delta, confidence)
    validate.whole_number("steps", steps)
    validate.whole_number("dim", dim)
    validate.positive("noise_multiplier", noise_multiplier)
    rng = np.random.default_rng(seed)
    included = rng.random(canaries) < 0.5
    model: nn.Module
    if canary == "crafted":
        target = torch.zeros(canaries, dim)
        target[:, 0] = 1e4
        model, loss_fn = Table(canaries, dim), linear_loss
        records, others = (torch.arange(canaries), target), None
        mechanism = kind_of(mechanism).worst_case().mechanism if isinstance(mechanism, str) else mechanism
    elif canary == "mislabelled":
        inputs, labels = kinds.digits(2_000 + canaries)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(inputs.shape[1], 32), nn.Tanh(), nn.Linear(32, kinds.CLASSES))
        loss_fn = nn.CrossEntropyLoss(reduction="none")
        records, others = (inputs[2_000:], (labels[2_000:] + 1) % kinds.CLASSES), (inputs[:2_000], labels[:2_000])
    else:
        raise InvalidArgument(f"canary is {canary!r}; a whole run takes 'crafted' or 'mislabelled'.")
    started = time.perf_counter()
    kept = torch.from_numpy(np.flatnonzero(included))
    data = tuple(part[kept] if rest is None else torch.cat([rest, part[kept]]) for part, rest in _zipped(records, others))
    engine = PrivacyEngine(
        model,
        torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9),
        TensorDataset(*data),
        loss_fn,
        mechanism=mechanism,
        expected_batch_size=max(1.0, sample_rate * canaries / 2) if others is None else sample_rate * (2_000 + canaries / 2),
        sample_rate=sample_rate,
        steps=steps,
        noise_multiplier=noise_multiplier,
        insecure_noise_seed=seed,
    )
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    for inputs_, targets in engine.batches():
        engine.step(inputs_, targets)
    scores = _scores(model, loss_fn, start, records)
    return judge_run(
        scores,
        included,
        engine_claim(engine, steps),
        mechanism=engine.mechanism.name,
        canary=canary,
        delta=delta,
        confidence=confidence,
        settings={"noise_multiplier": noise_multiplier, "sample_rate": sample_rate, "steps": steps, "dim": dim},
        seconds=time.perf_counter() - started,
    )


def judge_run(
    scores: dict[str, Array],
    included: np.ndarray[Any, np.dtype[np.bool_]],
    claim: Claim,
    *,
    mechanism: str,
    canary: str,
    delta: float,
    confidence: float,
    settings: dict[str, Any] | None = None,
    seconds: float = 0.0,
) -> Verdict:
    """Guess "in" for the highest scores and "out" for the lowest, for several numbers of guesses; all of it is paid for."""
    tests = len(scores) * len(_SHARES)
    risk = (1 - confidence) / tests
    best, attack, count = 0.0, next(iter(scores)), len(included)
    for name, score in scores.items():
        order = np.argsort(score)
        for share in _SHARES:
            each = max(1, int(share * count / 2))
            correct = int(included[order[-each:]].sum() + (~included[order[:each]]).sum())
            bound = epsilon_from_guesses(count, 2 * each, correct, delta, risk)
            if bound > best:
                best, attack = bound, name
    claimed = claim.epsilon(delta)
    return Verdict(
        mechanism=mechanism,
        canary=canary,
        claimed_epsilon=claimed,
        delta=delta,
        lower_bound=best,
        curve_bound=0.0,
        noise_factor=None,
        broken=best > claimed,
        proof=(delta, claimed, best) if best > claimed else None,
        confidence=confidence,
        trials=count,
        attack=attack,
        tests=tests,
        game="one run",
        nominal=claim.nominal,
        settings=settings or {},
        roc=rates(scores[attack][~included], scores[attack][included]),
        allowed=allowed(claim),
        seconds=round(seconds, 2),
    )


def _scores(model: nn.Module, loss_fn: LossFunction, start: dict[str, Tensor], records: tuple[Tensor, Tensor]) -> dict[str, Array]:
    """For each canary: how far its loss fell, and how far the model went down the slope of that loss."""
    inputs, targets = records
    end = {name: value.detach() for name, value in model.named_parameters()}
    fallen = [loss_fn(functional_call(model, weights, (inputs,)), targets).detach() for weights in (start, end)]
    found = {"fall of the canary's loss": (fallen[0] - fallen[1]).double().numpy()}
    if isinstance(model, Table):
        return found  # its loss is linear: the slope tells the same

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(functional_call(model, weights, (x.unsqueeze(0),)), y.unsqueeze(0))[0]

    slopes = vmap(grad(loss), in_dims=(None, 0, 0))(start, inputs, targets)
    moved = sum((slopes[name].flatten(1) @ (start[name] - end[name]).flatten()) for name in start)
    found["projection on the canary's gradient"] = torch.as_tensor(moved).detach().double().numpy()
    return found


def _zipped(records: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor] | None) -> list[tuple[Tensor, Tensor | None]]:
    return [(records[0], others[0] if others else None), (records[1], others[1] if others else None)]


# --- many runs --------------------------------------------------------------------------------------------------------
class TrainingGame(BatchGame):
    """A game is a training run of `training_steps` steps from the same start; what is seen is how far the model moved."""

    name = "many runs"

    def __init__(self, mechanism: str | Mechanism, *, training_steps: int, learning_rate: float = 0.1, **options: Any) -> None:
        super().__init__(mechanism, steps=training_steps, **options)
        self.training_steps, self.steps = training_steps, 1  # one observation per run
        model = self.engines[0].model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.start = [p.detach().clone() for p in self.parameters]
        for engine in self.engines:
            engine.optimizer = torch.optim.SGD(self.parameters, lr=learning_rate, momentum=0.9)

    def releases(self) -> Iterator[tuple[Array, Array]]:
        while True:
            yield tuple(np.stack([self._run(engine)[None] for _ in range(20)]) for engine in self.engines)  # type: ignore[misc]

    def _run(self, engine: PrivacyEngine) -> Array:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self.start, strict=True):
                parameter.copy_(value)
        engine.parameters_changed(public=True)
        engine.optimizer.state.clear()
        for inputs, targets in engine.batches(self.training_steps):
            engine.step(inputs, targets)
        moved = [(value - p.detach()).flatten() for p, value in zip(self.parameters, self.start, strict=True)]
        return torch.cat(moved).double().cpu().numpy()

    def signals(self) -> Array:
        engine, found = self.engines[1], []
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self.start, strict=True):
                parameter.copy_(value)
        views = [{name: torch.zeros_like(p) for name, p in site.parameters.items()} for site in engine.forward.sites]
        places = {id(p): (i, name) for i, site in enumerate(engine.forward.sites) for name, p in site.parameters.items()}
        public = engine.fitted.draw_public(0)
        for turn in range(100):
            secret = RandomSource(None if self.seed is None else 100 * self.seed + turn)
            signal = torch.from_numpy(signal_of(engine, self.canary, public, secret)).to(engine.forward.device)
            with torch.inference_mode():
                engine.fitted.gradients(signal, public, views)
            parts = [views[place[0]][place[1]].flatten() for place in (places[id(p)] for p in self.parameters)]
            found.append(torch.cat(parts).double().cpu().numpy())
        return np.stack(found)


def many_runs(
    mechanism: str | Mechanism = "hidden-direction",
    canary: str = "large",
    *,
    runs: int = 500,
    noise_multiplier: float = 1.0,
    sample_rate: float = 1.0,
    steps: int = 5,
    learning_rate: float = 0.1,
    delta: float = 1e-5,
    confidence: float = 0.95,
    seed: int | None = None,
) -> Verdict:
    """Train a small model `runs` times with the canary and `runs` times without, and tell them apart by where the model ended."""
    validate.whole_number("steps", steps)
    validate.positive("noise_multiplier", noise_multiplier)
    inputs, targets = kinds.digits()
    game = TrainingGame(
        mechanism,
        training_steps=steps,
        learning_rate=learning_rate,
        model=kinds.softmax_regression(),
        loss_fn=nn.CrossEntropyLoss(reduction="none"),
        records=(inputs[:-1], targets[:-1]),
        canary=kinds.make(canary, (inputs[-1], targets[-1])),
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        seed=seed,
    )
    settings = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate, "steps": steps}
    return play(game, canary=canary, trials=runs, delta=delta, confidence=confidence, settings=settings)
