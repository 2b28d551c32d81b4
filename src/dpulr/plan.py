"""The plan of a run: from what was asked for to one frozen value (rate, steps, noise, threshold, event), made once.

The engine, `dpulr plan`, the baselines and the tables all use it, so that noise, sampling and the charged event agree. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dpulr import accounting, validate
from dpulr.accounting.events import Charge, Release, SampledStep, Unaccounted, Unit
from dpulr.errors import BudgetError, InvalidArgument
from dpulr.sampling import PoissonSampling, ShuffledSampling

Sampling = Literal["poisson", "shuffle"]
_OPEN_END = 10_000_000


def steps_of(epochs: float, sample_rate: float) -> int:
    """Steps in which a record is seen `epochs` times on average: never fewer. The only place that turns epochs into steps."""
    return max(1, math.ceil(epochs / sample_rate - 1e-9))


def epochs_of(steps: int, sample_rate: float) -> float:
    """The epochs that `steps_of` turns into so many steps."""
    epochs = steps * sample_rate
    while steps_of(epochs, sample_rate) > steps:  # rounding, with very many steps
        epochs = math.nextafter(epochs, 0.0)
    return epochs


@dataclass(frozen=True)
class Request:
    """What was asked for. `records` is the size of the data set; `void` says why no epsilon can be certified whatever the rest is.

    Where `unit` is "person", people are sampled, so that all that counts records counts people; each takes part in a step with at
    most `per_person` records.

    `batch_size` takes the size of the data set as public; where that is private, give `expected_batch_size` and `sample_rate`.
    """

    records: int
    batch_size: int | None = None
    expected_batch_size: float | None = None
    sample_rate: float | None = None
    epochs: float | None = None
    steps: int | None = None
    target_epsilon: float | None = None
    target_delta: float = 1e-5
    noise_multiplier: float | None = None
    sampling: Sampling = "poisson"
    rejection_threshold: int | Literal["auto"] = 0
    min_dataset_size: int | None = None
    void: str | None = None
    unit: Unit = "record"
    per_person: int = 1

    def __post_init__(self) -> None:
        self._check_budget()
        self._check_batches()
        self._check_length()
        self._check_sampling()

    def _check_budget(self) -> None:
        if self.target_epsilon is not None:
            validate.positive("target_epsilon", self.target_epsilon)
        if self.noise_multiplier is not None:
            validate.at_least("noise_multiplier", self.noise_multiplier, 0)
        if self.target_epsilon is not None and self.noise_multiplier == 0:
            raise InvalidArgument("noise_multiplier is 0: without noise no target_epsilon can be met.")
        validate.delta_or_zero(self.target_delta, "target_delta")

    def _check_batches(self) -> None:
        if self.batch_size is not None:
            if self.expected_batch_size is not None or self.sample_rate is not None:
                raise InvalidArgument("give batch_size, or expected_batch_size and sample_rate, not both.")
            validate.whole_number("batch_size", self.batch_size)
            if self.batch_size > self.records:
                raise InvalidArgument(f"batch_size is {self.batch_size}, but the data set has only {self.records} {self.counted}.")
            return
        if self.expected_batch_size is None or self.sample_rate is None:
            raise InvalidArgument(
                "give batch_size; or, where the size of the data set is private, expected_batch_size and sample_rate."
            )
        validate.rate(self.sample_rate)
        validate.positive("expected_batch_size", self.expected_batch_size)

    def _check_length(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise InvalidArgument("give epochs or steps, not both.")
        if self.steps is not None:
            validate.whole_number("steps", self.steps)
        elif self.epochs is not None:
            validate.positive("epochs", self.epochs)
        elif self.target_epsilon is None or self.noise_multiplier is None:
            raise InvalidArgument(
                "give epochs or steps (or both target_epsilon and noise_multiplier: then training goes on until the target)."
            )

    def _check_sampling(self) -> None:
        validate.one_of("sampling", self.sampling, ("poisson", "shuffle"))
        if self.sampling == "shuffle" and (self.rejection_threshold != 0 or self.expected < 1):
            raise InvalidArgument("shuffled batches have a fixed size of at least 1: there is nothing to reject.")
        if self.rejection_threshold != "auto":
            validate.whole_number("rejection_threshold", self.rejection_threshold, 0)
        if self.rejection_threshold != 0 and self.batch_size is None and self.min_dataset_size is None:
            raise InvalidArgument(
                "rejection_threshold with a private size of the data set needs min_dataset_size, a public lower bound."
            )
        if self.min_dataset_size is not None:
            validate.whole_number("min_dataset_size", self.min_dataset_size)
            if not self.min_dataset_size < self.records:
                raise InvalidArgument(
                    f"min_dataset_size is {self.min_dataset_size}, but the data set has {self.records} {self.counted}: without "
                    f"one of them it has {self.records - 1}. It must be at least 1 and no larger than that."
                )
        if self.sampling == "poisson" and self.rejection_threshold != "auto":
            PoissonSampling(self.rate, self.rejection_threshold).check(self.smaller_neighbour)

    @property
    def counted(self) -> str:
        return "people" if self.unit == "person" else "records"

    @property
    def rate(self) -> float:
        """The chance of a record to be in a batch: public, whatever batch is drawn."""
        return self.batch_size / self.records if self.batch_size is not None else float(self.sample_rate or 0)

    @property
    def expected(self) -> float:
        """The expected batch size, which the update is divided by: public, too."""
        return float(self.batch_size if self.batch_size is not None else self.expected_batch_size or 0)

    @property
    def planned_steps(self) -> int:
        if self.steps is not None:
            return int(self.steps)
        return _OPEN_END if self.epochs is None else steps_of(self.epochs, self.rate)

    @property
    def smaller_neighbour(self) -> int:
        """The size of the smaller of two neighbouring data sets, at which rejection is most costly."""
        return self.records - 1 if self.min_dataset_size is None else int(self.min_dataset_size)

    @property
    def reason_for_none(self) -> str | None:
        """Why no step of the run has a guarantee, if so."""
        return self.void or ("batches were shuffled, not sampled" if self.sampling == "shuffle" else None)


@dataclass(frozen=True)
class Plan:
    """What every step does. `step` is what it releases (None without noise), `void` why it has no guarantee, if so."""

    sample_rate: float
    expected_batch_size: float
    steps: int
    noise_multiplier: float
    rejection_threshold: int
    min_dataset_size: int
    sampling: Sampling
    target_epsilon: float | None
    target_delta: float
    step: SampledStep | None
    void: str | None
    public_size: int | None = None
    """The size of the data set, where it was taken as public."""
    unit: Unit = "record"
    per_person: int = 1

    @property
    def event(self) -> SampledStep | Unaccounted:
        """What one step is charged as."""
        if self.step is None or self.void is not None:
            return Unaccounted(self.void or "no noise was added")
        return self.step

    def at(self, step: int) -> Plan:
        """The plan of one step, counted from 0. Only settings that vary by step (the paper's) make a difference."""
        return self

    def sampler(self) -> PoissonSampling | ShuffledSampling:
        if self.sampling == "shuffle":
            return ShuffledSampling(round(self.expected_batch_size))
        return PoissonSampling(self.sample_rate, self.rejection_threshold)

    def limited(self, spent: Iterable[Charge] = ()) -> Plan:
        """Never plan a step that would exceed the target on top of what is spent. `steps` counts what is spent, too."""
        if self.target_epsilon is None or self.step is None:
            return self
        spent = list(spent)
        taken = sum(charge.count for charge in spent)
        allowed = max(0, self.steps - taken)
        if accounting.epsilon([*spent, Charge(self.step, allowed)], self.target_delta) > self.target_epsilon:
            allowed = accounting.max_steps(self.step, target_epsilon=self.target_epsilon, delta=self.target_delta, already=spent)
        if allowed + taken == 0:
            raise BudgetError(
                f"not one step fits: with noise_multiplier={self.noise_multiplier} and sample_rate={self.sample_rate:.3g} the "
                f"first step costs more than target_epsilon={self.target_epsilon}. Add noise or raise the target."
            )
        return replace(self, steps=taken + allowed)


def certified_plan(request: Request, release_at: Callable[[float], Release]) -> Plan:
    """The plan of a mechanism that is priced by its release: the noise is calibrated to the target, unless it is given."""
    if request.target_epsilon is None and request.noise_multiplier is None:
        raise InvalidArgument("give target_epsilon (the noise is then calibrated to it) or noise_multiplier.")
    if request.target_delta == 0 and release_at(1.0).pure_epsilon is None:
        validate.delta(request.target_delta, "target_delta")
    threshold = 0 if request.rejection_threshold == "auto" else int(request.rejection_threshold)
    noise = _noise(request, release_at, threshold)
    if request.rejection_threshold == "auto":
        threshold = accounting.auto_rejection_threshold(
            release_at(noise),
            sample_rate=request.rate,
            steps=request.planned_steps,
            delta=request.target_delta,
            min_dataset_size=request.smaller_neighbour,
        )
        noise = _noise(request, release_at, threshold)
    step = sampled_step(request, release_at(noise), threshold) if noise > 0 else None
    return plan_of(request, noise, threshold, step, request.reason_for_none).limited()


def plan_of(request: Request, noise: float, threshold: int, step: SampledStep | None, void: str | None) -> Plan:
    return Plan(
        sample_rate=request.rate,
        expected_batch_size=request.expected,
        steps=request.planned_steps,
        noise_multiplier=noise,
        rejection_threshold=threshold,
        min_dataset_size=request.smaller_neighbour,
        sampling=request.sampling,
        target_epsilon=request.target_epsilon,
        target_delta=request.target_delta,
        step=step,
        void=void,
        public_size=None if request.batch_size is None else request.records,
        unit=request.unit,
        per_person=request.per_person,
    )


def sampled_step(request: Request, release: Release, threshold: int) -> SampledStep:
    return SampledStep(release, request.rate, threshold, request.smaller_neighbour if threshold else None, request.unit)


def _noise(request: Request, release_at: Callable[[float], Release], threshold: int) -> float:
    """The noise that was given, or the least with which the planned steps stay within the target."""
    if request.noise_multiplier is not None:
        return float(request.noise_multiplier)
    assert request.target_epsilon is not None
    return accounting.calibrate_release(
        release_at,
        target_epsilon=request.target_epsilon,
        delta=request.target_delta,
        sample_rate=request.rate,
        steps=request.planned_steps,
        rejection_threshold=threshold,
        min_dataset_size=request.smaller_neighbour if threshold else None,
    )
