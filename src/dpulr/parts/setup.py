"""What an engine does once, before the first step: its randomness and its optimizer, what it refuses, and what it says."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from dpulr import accounting, validate
from dpulr.accounting.disk_ledger import ledger_at
from dpulr.auto import MOMENTUM, Task, warnings_for
from dpulr.distributed.facts import check_shareable, facts
from dpulr.distributed.ranks import Alone, digest_of
from dpulr.errors import Advice, DataError, InvalidArgument
from dpulr.mechanisms import Mechanism
from dpulr.mechanisms.base import FittedMechanism
from dpulr.mechanisms.check import check_mechanism, is_foreign
from dpulr.membership import Membership, Unit
from dpulr.model.batches import call_on_copy
from dpulr.model.forward import Forward
from dpulr.model.losses import LossFunction
from dpulr.model.weights import WeightFunction, lost_weights
from dpulr.plan import Plan, Request
from dpulr.randomness import RandomSource

_REPLAYED, _MOST_ROWS = 64, 8_000
_WORTH_ADVICE = 50  # steps: to find the advice takes about as long as one or two
_ADVISED: list[str] = []
"""What was said to the user of this process; nothing is said twice."""


# --- what is given --------------------------------------------------------------------------------------------------------
def secret_source(insecure_noise_seed: int | None, randomness: RandomSource | None, rank: int) -> RandomSource:
    """Where secret randomness comes from: the operating system, unless something else is given."""
    if insecure_noise_seed is not None:
        if randomness is not None:
            raise InvalidArgument("give insecure_noise_seed or randomness, not both.")
        validate.whole_number("insecure_noise_seed", insecure_noise_seed, 0)
        insecure_noise_seed += rank << 64  # each rank draws its own
    return RandomSource(insecure_noise_seed) if randomness is None else randomness


def optimizer_of(model: nn.Module, optimizer: torch.optim.Optimizer | Literal["auto"]) -> torch.optim.Optimizer:
    """The one that is given; for "auto" SGD with momentum, whose learning rate is set before every step."""
    if not isinstance(optimizer, str):
        return optimizer
    validate.one_of("optimizer", optimizer, ("auto",))
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0, momentum=MOMENTUM)


def rows_of_a_pass(request: Request) -> int:
    """About as many as the largest pass of a step has: repeats and layers share one. It depends on public numbers only."""
    return int(min(_REPLAYED * request.expected * request.per_person, _MOST_ROWS))


def people_of(dataset: Any, unit: Unit, ranks: Alone, source: RandomSource) -> Membership:
    """Who the records belong to: read as records are, with secret randomness."""
    if ranks.sharded:
        raise InvalidArgument("unit= with sharded=True: a person's records may lie on two ranks. Give all ranks the whole data.")
    with source.reading_randomness():
        found = Membership.of(dataset, unit)
    if found.people == 0:
        raise DataError("unit says of no record who it belongs to: all labels are missing, or can't be read.")
    return found


# --- what is refused ------------------------------------------------------------------------------------------------------
def check_numbers(*, seed: int, memory_limit: int | None, max_per_person: int) -> None:
    validate.whole_number("seed", seed, 0)
    if memory_limit is not None:
        validate.whole_number("memory_limit", memory_limit)
    validate.whole_number("max_per_person", max_per_person)


def check_weights_are_taken(weights: WeightFunction | None, mechanism: Mechanism, per_person: int) -> None:
    if weights is not None and not mechanism.takes_weights:
        raise InvalidArgument(f"the mechanism {mechanism.name} does not weigh records: leave out weights=.")
    if weights is not None and per_person > 1:  # a person is bounded by the mean over all records, which weights would change
        raise InvalidArgument("weights= with several records of a person: use max_per_person=1, or leave out weights=.")


def check_weights_of_loss(loss_fn: LossFunction, mechanism: Mechanism, forward: Forward, model: nn.Module) -> None:
    """Weights in a loss that would be forgotten without a word."""
    if mechanism.keeps_sizes:
        return
    inputs, targets = forward.probe
    with torch.inference_mode(), forward.checked_mode():
        lost = lost_weights(loss_fn, call_on_copy(model, inputs), targets)
    if lost is not None:
        raise InvalidArgument(
            f"{lost} of {type(loss_fn).__name__} would change nothing: the mechanism {mechanism.name} keeps only the sign "
            "of a difference of losses. Give the engine weights=dpulr.class_weights([...]) instead, or the mechanism "
            "kappa='adaptive' (docs/losses.md)."
        )


def reason_against(mechanism: Mechanism, forward: Forward, plan: Plan, *, memory_limit: int | None, seed: int) -> str | None:
    """Why nothing is certified of a mechanism that is none of the package's own. It is tried before it is believed."""
    if not is_foreign(mechanism):
        return None
    reason = check_mechanism(mechanism.fit(forward, plan, memory_limit=memory_limit, seed=seed), forward, plan)
    return reason and f"the mechanism {mechanism.name} comes from outside, and its bound could not be shown: {reason}"


# --- several ranks --------------------------------------------------------------------------------------------------------
def agree(ranks: Alone, membership: Membership | None, settings: Mapping[str, Any], **known: Any) -> None:
    """All ranks have the same model and the same settings, or nothing begins."""
    if ranks.size > 1:
        key = ranks.shared(lambda: secrets.token_bytes(32))  # without it, which nobody keeps, a hash in a refusal tells nothing
        owners = None if membership is None else digest_of([torch.from_numpy(membership.owners)], key)
        ranks.agree(facts(ranks=ranks, settings={**settings, "unit (who has which records)": owners}, key=key, **known))


def share(fitted: FittedMechanism[Any], request: Request, ranks: Alone) -> None:
    """Tell a mechanism which part of the noise, or of the passes, is this rank's."""
    if ranks.size > 1:
        check_shareable(fitted, request)
        fitted.shares, fitted.sharers = ranks.noise_shares, ranks.size if ranks.parallel == "records" else 1
        if ranks.parallel == "passes":
            fitted.split_passes(ranks.rank, ranks.size)


# --- what is written and said ---------------------------------------------------------------------------------------------
def opened_ledger(path: str | Path, plan: Plan) -> accounting.Ledger:
    """A ledger on disk that begins with this plan."""
    fixed = ("noise_multiplier", "rejection_threshold", "target_epsilon", "target_delta")
    return ledger_at(Path(path), planned_steps=plan.steps, **{name: getattr(plan, name) for name in fixed})


def warn_of_weak_settings(plan: Plan, task: Task, target_epsilon: float | None, *, stacklevel: int) -> None:
    """Budgets that protect little, or buy little. Nothing is said of a private number of records."""
    if plan.public_size is None or plan.event.reasons:
        return
    few = accounting.warnings_for(target_epsilon, plan.target_delta, plan.public_size, plan.unit)
    for sentence in few or warnings_for(task):
        warnings.warn(sentence, stacklevel=stacklevel + 1)


def advise(plan: Plan, notes: Callable[[], list[str]], *, stacklevel: int) -> None:
    """What a user should know of this mechanism on this model, once per process, where a run is long enough."""
    if plan.event.reasons or plan.steps < _WORTH_ADVICE or _ADVISED:
        return
    for note in notes():
        warnings.warn(note, Advice, stacklevel=stacklevel + 1)
        _ADVISED.append(note)
