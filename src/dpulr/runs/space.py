"""What a search for settings is made of: the candidates, what a run of each costs, and what the whole search costs.

Names and values are checked before any data is read (docs/tune.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, Literal

from dpulr import search, validate
from dpulr.accounting import selection
from dpulr.accounting.events import Charge, Release, SampledStep, Unaccounted
from dpulr.accounting.selection import RandomRuns, SearchCost
from dpulr.auto import Choice
from dpulr.errors import BudgetError, PrivacyRefusal, UsageError
from dpulr.runs.loading import load_data, make_model
from dpulr.runs.settings import NAMES, Settings
from dpulr.runs.training import Training, outline_of

ScoreOn = Literal["holdout", "test"]
FIXED = (
    *("dataset", "holdout", "test", "unit", "max_per_person", "target_epsilon", "target_delta", "noise_multiplier", "sampling"),
    *("rejection_threshold", "min_dataset_size", "insecure_noise_seed", "evaluations", "evaluation_epsilon", "temperature"),
    "seconds",
)
"""Settings that are the same in all runs of a search: they decide who is protected, and by what."""
_WIDTH, _LEAST, _FIRST, _MOST = 2e-3, math.log(0.05), math.log(2.0), math.log(1e4)
_FEWEST = 100  # held-out records that a score can be made of


@dataclass(frozen=True)
class Search:
    """What is searched: settings that all runs share, values of others, and how many runs there are on average."""

    base: Settings
    space: Mapping[str, Sequence[Any]]
    runs: float = 10.0
    eta: float = 0.0
    score_on: ScoreOn = "holdout"

    def __post_init__(self) -> None:
        validate.one_of("score_on", self.score_on, ("holdout", "test"))
        self.law  # noqa: B018 - an odd number of runs is refused here
        if self.base.sampling != "poisson" or self.base.insecure_noise_seed is not None or self.base.mechanism == "paper":
            raise PrivacyRefusal("a search needs runs that have a guarantee: Poisson sampling, secret noise, a proof.")
        if self.base.unit is not None and self.score_on == "holdout":
            raise UsageError(
                "with unit= a person could be trained on and scored on: give score_on='test', with a test part that is public."
            )
        if self.base.evaluation_epsilon is not None:
            raise UsageError("a search scores its runs on held-out records by itself: leave out --evaluation-epsilon.")
        if self.base.temperature is not None or self.base.seconds is not None:
            raise UsageError("a search has a fixed number of epochs, and no temperature: leave out --seconds and --temperature.")
        self.candidates  # noqa: B018 - so are names that do not exist

    @cached_property
    def law(self) -> RandomRuns:
        """Of the number of runs."""
        return RandomRuns.about(self.runs, self.eta)

    @cached_property
    def candidates(self) -> tuple[Settings, ...]:
        """All settings of the space."""
        for name, values in self.space.items():
            plain = name if not name.startswith("mechanism.") else "mechanism"
            if plain not in NAMES:
                raise UsageError(f"the search space names {name!r}, but there is no such setting. There are: {', '.join(NAMES)}.")
            if plain in FIXED:
                raise UsageError(f"the search space names {name!r}, which must be the same in all runs of a search.")
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise UsageError(f"the search space gives {name!r} no list of values to choose from, but {values!r}.")
        found = tuple(self.with_values(dict(zip(self.space, values, strict=True))) for values in product(*self.space.values()))
        if len(found) < 2:
            raise UsageError("the search space has one setting only: there is nothing to choose. Train it with 'dpulr train'.")
        return found

    def with_values(self, values: Mapping[str, Any]) -> Settings:
        own = {name: value for name, value in values.items() if not name.startswith("mechanism.")}
        more = {name.removeprefix("mechanism."): value for name, value in values.items() if name.startswith("mechanism.")}
        config = {**self.base.to_dict(), **own}
        return Settings.build({**config, "mechanism_options": {**self.base.mechanism_options, **more}})

    def values_of(self, candidate: int) -> dict[str, Any]:
        """What the search has chosen for this candidate."""
        return dict(zip(self.space, list(product(*self.space.values()))[candidate], strict=True))

    def to_dict(self) -> dict[str, Any]:
        space = {name: list(values) for name, values in self.space.items()}
        return {"base": self.base.to_dict(), "space": space, "runs": self.runs, "eta": self.eta, "score_on": self.score_on}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Search:
        return cls(**{**data, "base": Settings.build(data["base"])})


@dataclass(frozen=True)
class SearchPlan:
    """A search with its noise: a multiplier for each of its candidates, in which nothing is left to "auto" any more.

    score_noise is None where scores are public.
    """

    search: Search
    candidates: tuple[Settings, ...]
    noise: tuple[float, ...]
    charges: tuple[Charge, ...]
    cost: SearchCost
    training_records: int
    held_out_records: int

    @property
    def score_noise(self) -> float | None:
        return self.cost.score_noise


def with_noise(settings: Settings, noise: float) -> Settings:
    """Those that a run trains with: the noise is given, and the budget is the search's."""
    return replace(settings, noise_multiplier=noise, target_epsilon=None)


def parts(search_: Search) -> tuple[Any, Any, Any]:
    """What is trained on, what is scored on, and the test part."""
    train, test = load_data(replace(search_.base, holdout=0))
    if search_.score_on == "test":
        if test is None:
            raise UsageError(f"{search_.base.dataset} has no test part to score on: give --test FILE, or score_on='holdout'.")
        return train, test, test
    train, held_out = load_data(with_holdout(search_.base, len(train)))
    return train, held_out, test


def with_holdout(base: Settings, records: int) -> Settings:
    """A tenth of the training records is held out where nothing is said."""
    holdout = base.holdout or records // 10
    if holdout < _FEWEST:
        raise UsageError(f"{holdout} held-out records are too few to tell runs apart under noise: at least {_FEWEST} are needed.")
    return replace(base, holdout=holdout, test=None)


def plan_search(search_: Search) -> SearchPlan:
    """The noise of each candidate, such that the whole search stays within the budget; or, with a given noise, what it costs."""
    train, scored, _ = parts(search_)
    candidates = _settled(search_, train)
    steps = _Steps(candidates, train)
    delta, target = search_.base.target_delta, search_.base.target_epsilon
    given = search_.base.noise_multiplier
    if given is not None:
        noise = [given] * len(search_.candidates)
    elif target is None:
        raise UsageError("give --target-epsilon, the budget of the whole search, or --noise-multiplier.")
    else:
        noise = steps.calibrated(search_, target, delta)
    charges = [steps.charge(i, own) for i, own in enumerate(noise)]
    cost = _cost(search_, charges, delta)
    while target is not None and cost.total > target:
        if given is not None:
            raise BudgetError(
                f"with noise_multiplier={given:g} a search of about {search_.runs:g} runs costs epsilon {cost.total:.3g}, above "
                f"the budget of {target:g}: add noise, take fewer runs, or raise the budget."
            )
        noise = [1.005 * own for own in noise]  # the worst candidate of each order may exceed each one alone
        charges = [steps.charge(i, own) for i, own in enumerate(noise)]
        cost = _cost(search_, charges, delta)
    held_out = len(scored) if search_.score_on == "holdout" else 0
    return SearchPlan(search_, candidates, tuple(noise), tuple(charges), cost, len(train), held_out)


def _settled(search_: Search, train: Any) -> tuple[Settings, ...]:
    """With what was left to "auto" as numbers: those of a run with half the budget, which is about what a search leaves for one."""
    budget = None if search_.base.target_epsilon is None else search_.base.target_epsilon / 2
    known: dict[str, Choice] = {}

    def settled(settings: Settings) -> Settings:
        left = [name for name in ("batch_size", "repeats", "learning_rate") if getattr(settings, name) == "auto"]
        if not left:
            return settings
        key = repr(settings)
        if key not in known:
            known[key] = outline_of(replace(settings, target_epsilon=budget), train).choice
        return replace(settings, **{name: getattr(known[key], name) for name in left})

    return tuple(settled(settings) for settings in search_.candidates)


def _cost(search_: Search, charges: Iterable[Charge], delta: float) -> SearchCost:
    candidates = [[charge] for charge in charges]
    cost = selection.search_cost(candidates, search_.law, delta, None)
    if math.isinf(cost.training):
        raise BudgetError("the noise is too small: epsilon of the search is infinite at this delta.")
    if search_.score_on == "test":
        return cost
    score_noise = selection.score_noise_for(cost.training, search_.law, delta)
    return selection.search_cost(candidates, search_.law, delta, score_noise)


class _Steps:
    """What a step of each candidate releases, for any noise: candidates that differ in the optimizer only share it."""

    def __init__(self, candidates: Sequence[Settings], train: Any) -> None:
        known: dict[str, tuple[SampledStep, Any, int]] = {}
        self._kinds = []
        for settings in candidates:
            neutral = replace(settings, learning_rate=1.0, momentum=0.0, schedule="constant", seed=0)
            kind = repr(neutral)
            if kind not in known:
                known[kind] = self._tried(neutral, train)
            self._kinds.append(kind)
        self._known = known

    @staticmethod
    def _tried(settings: Settings, train: Any) -> tuple[SampledStep, Any, int]:
        engine = Training(with_noise(settings, 1.0), train, make_model(settings)).engine
        event = engine.plan.event
        if isinstance(event, Unaccounted) or not event.certified or engine.reasons:
            why = f" ({engine.reasons[0]})" if engine.reasons else ""
            raise PrivacyRefusal(f"a search needs runs that have a guarantee, and {settings.mechanism} has none here{why}.")
        return event, partial(engine.mechanism.release, engine.forward.sites), engine.planned_steps

    def charge(self, candidate: int, noise: float) -> Charge:
        step, release, steps = self._known[self._kinds[candidate]]
        made: Release = release(noise)
        return Charge(replace(step, release=made), steps)

    def calibrated(self, search_: Search, target: float, delta: float) -> list[float]:
        """For each candidate the least noise with which a search over it alone stays within the target."""
        found: dict[str, float] = {}
        for candidate, kind in enumerate(self._kinds):
            if kind in found:
                continue

            def exceeds(log_noise: float, candidate: int = candidate) -> bool:
                charges = [[self.charge(candidate, math.exp(log_noise))]]
                return selection.search_cost(charges, search_.law, delta, None, alone=False).total > target

            high = _FIRST
            while high < _MOST and exceeds(high):
                high += 1
            if high >= _MOST:
                raise BudgetError(
                    f"the budget is too small: no noise keeps a search of about {search_.runs:g} runs within epsilon {target:g} at "
                    f"delta {delta:g}. Take fewer runs, or raise the budget."
                )
            while high > _LEAST and not exceeds(high - 1):
                high -= 1
            found[kind] = math.exp(search.boundary(exceeds, high - 1, high, _WIDTH)[1])
        return [found[kind] for kind in self._kinds]
