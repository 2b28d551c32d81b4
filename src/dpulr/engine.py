"""`PrivacyEngine`: private steps on a model that is never wrapped, with any torch optimizer.

`step` reads from top to bottom: charge, draw in public, sum of bounded signals, noise, gradients, optimizer. The engine stops
before the step that would exceed the target epsilon.
"""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpulr import accounting, validate
from dpulr.accounting.disk_ledger import ledger_at
from dpulr.accounting.events import Charge, GaussianRelease, SampledStep, Unaccounted
from dpulr.accounting.statement import Guarantee
from dpulr.auto import choose, warnings_for
from dpulr.chosen import make_optimizer, task_of
from dpulr.distributed.facts import check_shareable, facts, gathered_records
from dpulr.distributed.ranks import digest_of, join
from dpulr.errors import Advice, BudgetError, DataError, InvalidArgument, StepError
from dpulr.loops import Batches, Epochs
from dpulr.mechanisms import Mechanism, by_name
from dpulr.mechanisms.base import WITH_MARGIN, Gradients, on_grid
from dpulr.mechanisms.check import check_mechanism, is_foreign
from dpulr.membership import Membership, Unit
from dpulr.misuse import Watch
from dpulr.model.batches import call_on_copy, handed_out
from dpulr.model.forward import sum_of_vectors
from dpulr.model.losses import LossFunction
from dpulr.model.opaque import uncompiled, without_compiling
from dpulr.model.people import People
from dpulr.model.prepare import prepare
from dpulr.model.trained_layers import check_optimizer, find_layers
from dpulr.model.weights import WeightFunction, lost_weights
from dpulr.plan import Plan, Request, Sampling
from dpulr.private_scores import HeldOut
from dpulr.randomness import RandomSource

Batch = tuple[Any, Any]
_READ_AT_ONCE = 1_000
_WORTH_ADVICE = 50  # steps: to find the advice takes about as long as one or two
_ADVISED: list[str] = []
"""What was said to the user of this process; nothing is said twice."""


@dataclass(frozen=True)
class Released:
    """What a step has made public: the noised sum, before it is divided, and what was drawn in public for it."""

    step: int
    public: Any
    values: Tensor


class PrivacyEngine:
    """Trains `model` on `dataset` with differential privacy, by forward passes alone.

    Give `target_epsilon` (the noise is calibrated to it) or `noise_multiplier`; with both, the engine stops before the step that
    would exceed the target. Give `epochs` or `steps`. What is left out of batch size and repeats is chosen by public arithmetic
    (`dpulr.auto`); `engine.choice` says what and why. Where torch.distributed is initialised, its processes train one model
    together (docs/scale.md).

    Args:
        model: any module; it is not wrapped.
        optimizer: any torch optimizer of the model's parameters; "auto" chooses rate, schedule and momentum, too.
        dataset: map-style, with items (inputs, target).
        loss_fn: from outputs and targets to one value per record.
        mechanism: a name, or one with settings, such as `dpulr.HiddenDirection(repeats=8)`.
        batch_size: the expected size of a batch. It takes the size of the data set as public.
        expected_batch_size: with `sample_rate` instead of `batch_size`, where the size of the data set is private.
        sample_rate: the probability with which a record is in a batch.
        rejection_threshold: smaller batches are drawn again; `min_dataset_size` is the least size that the data set may have.
        memory_limit: bytes that passes may take at once.
        seed: for public randomness only.
        insecure_noise_seed: for tests; voids the guarantee. So does `randomness`, another source of secret randomness.
        replay: how passes are run again: "trace" or "hook" instead of what is fastest.
        schema: an example of a record, whose shapes and types all others must have, and which are public (default: the first's).
        ledger: a file (.../ledger.jsonl) on which every step is charged before it is computed; what it holds counts as spent.
        weights: a public function of the targets that gives each record a weight of at most 1 (`dpulr.class_weights`).
        num_workers: processes that read records one step ahead, where these are not rows of tensors; that step is charged then.
        process_group: of torch.distributed, other than the default one.
        sharded: each rank has a data set of its own, instead of its part of the rows of one.
        parallel: "passes": all ranks take the same batch, and share the passes.
        shared_noise: each rank adds its share of the noise before anything leaves it; if False, rank 0 sees the bare sum.
        rank_timeout: how many seconds a rank waits for another.
        unit: who a record belongs to (a column's name, a function of a record, or a label for each record): then people are
            protected, sampled and counted by `batch_size`, rather than records (docs/users.md).
        max_per_person: the most records of a person in a step, chosen at random.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Literal["auto"],
        dataset: Dataset[Any],
        loss_fn: LossFunction,
        *,
        mechanism: str | Mechanism = "hidden-direction",
        batch_size: int | None = None,
        expected_batch_size: float | None = None,
        sample_rate: float | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        target_epsilon: float | None = None,
        target_delta: float = 1e-5,
        noise_multiplier: float | None = None,
        sampling: Sampling = "poisson",
        rejection_threshold: int | Literal["auto"] = 0,
        min_dataset_size: int | None = None,
        memory_limit: int | None = None,
        seed: int = 0,
        insecure_noise_seed: int | None = None,
        randomness: RandomSource | None = None,
        replay: Literal["auto", "trace", "hook"] = "auto",
        schema: tuple[Any, Any] | None = None,
        ledger: str | Path | None = None,
        weights: WeightFunction | None = None,
        num_workers: int = 0,
        process_group: Any = None,
        sharded: bool = False,
        parallel: Literal["records", "passes"] = "records",
        shared_noise: bool = True,
        rank_timeout: float = 300.0,
        unit: Unit = None,
        max_per_person: int = 8,
    ) -> None:
        self.ranks = join(process_group, timeout=rank_timeout, sharded=sharded, parallel=parallel, shared_noise=shared_noise)
        source = self._source = _source(insecure_noise_seed, randomness, self.ranks.rank)
        self._model_randomness, self._reading_randomness = source.model_randomness, source.reading_randomness
        validate.whole_number("seed", seed, 0)
        if memory_limit is not None:
            validate.whole_number("memory_limit", memory_limit)
        validate.whole_number("max_per_person", max_per_person)
        most = 1 if unit is None else max_per_person
        self.mechanism = by_name(mechanism).for_people(most)
        self._sets_rate = isinstance(optimizer, str)
        if isinstance(optimizer, str):
            validate.one_of("optimizer", optimizer, ("auto",))
            optimizer = make_optimizer(model)
        self.model, self.optimizer = model, optimizer
        shared = self.mechanism.shares_parameters
        find_layers(uncompiled(model), shared=shared)  # names what can't be trained at all, before the data set is opened
        device = check_optimizer(model, optimizer)
        self.records = gathered_records(dataset, device, schema, self.ranks, num_workers=num_workers)
        self._membership = None if unit is None else self._people_of(dataset, unit)
        asked: dict[str, Any] = {
            "records": sum(self.ranks.gathered(self.records.size)) if sharded else self._units,
            "batch_size": batch_size,
            "expected_batch_size": expected_batch_size,
            "sample_rate": sample_rate,
            "epochs": epochs,
            "steps": steps,
            "target_epsilon": target_epsilon,
            "target_delta": target_delta,
            "noise_multiplier": noise_multiplier,
        }
        open_size = batch_size is expected_batch_size is sample_rate is None
        make = partial(
            Request,
            sampling=sampling,
            rejection_threshold=rejection_threshold,
            min_dataset_size=min_dataset_size,
            void=source.reason_for_none or self.records.reason_for_none,
            unit="record" if unit is None else "person",
            per_person=most,
        )
        request = make(**asked | ({"batch_size": asked["records"]} if open_size else {}))
        self._check_weights_are_taken(weights, most)
        self.forward = prepare(
            model,
            loss_fn,
            self.records.example,
            device,
            space=self.mechanism.space,
            method=replay,
            shared=shared,
            again=self.mechanism.calls_again,
            weights=weights,
            sites=self.mechanism.uses_sites,
        )
        self._check_weights_of_loss(loss_fn)
        self.task, size = task_of(self.mechanism, self.forward, optimizer, **asked)
        repeats = getattr(self.mechanism, "repeats", None)
        self.choice = choose(self.task, batch_size=size, repeats=repeats if isinstance(repeats, int) else None)
        if open_size:
            request = make(**asked | {"batch_size": self.choice.batch_size})
        self.mechanism = self.mechanism.with_repeats(self.choice.repeats).settled(self.forward)
        owners = None if self._membership is None else digest_of([torch.from_numpy(self._membership.owners)])
        settings = {"seed": seed, "replay": replay, "insecure_noise_seed": insecure_noise_seed}
        self._agree(loss_fn, request, {**settings, "unit (who has which records)": owners})
        self.plan: Plan = self.ranks.shared(lambda: self.mechanism.plan(request, self.forward.sites))
        self.fitted = self.mechanism.fit(self.forward, self.plan, memory_limit=memory_limit, seed=seed)
        if self.ranks.size > 1:
            check_shareable(self.fitted, request)
            self.fitted.shares = self.ranks.noise_shares
            if parallel == "passes":
                self.fitted.split_passes(self.ranks.rank, self.ranks.size)
        self.run, self._reasons = self.ranks.shared(lambda: secrets.token_hex(8)), list[str]()
        self.ledger: accounting.Ledger = _LEDGERS.setdefault(self.run, accounting.Ledger())
        trained = self.forward.parameters()
        frozen = [parameter for parameter in model.parameters() if parameter not in set(trained)]
        self._watch = Watch(optimizer, trained, self._void, frozen)
        self._sampler = self.plan.sampler()
        self._batch_rng, self._noise = self.ranks.batch_stream(source), self.fitted.noise(source)
        self._directions = source.directions(device, self.forward.dtype)
        groups = self.fitted.streams if type(optimizer).__module__.startswith("torch.optim.") else []
        self._groups = groups if len(groups) > 1 else [list(range(len(self.forward.sites)))]
        self._gradients: Gradients = []
        self._observers: list[Callable[[Released], None]] = []
        self._own: tuple[Batch, People | None] = ((), ()), None
        self._current: Batch | None = None
        self._ahead: Callable[[], tuple[Batch, np.ndarray]] | None = None
        if ledger is not None:
            fixed = ("noise_multiplier", "rejection_threshold", "target_epsilon", "target_delta")
            start = {name: getattr(self.plan, name) for name in fixed}
            self.use_ledger(lambda: ledger_at(Path(ledger), planned_steps=self.plan.steps, **start))
        self._check_mechanism_from_outside(memory_limit, seed)
        if self.plan.public_size is not None and not self.plan.event.reasons and self.ranks.rank == 0:
            few = accounting.warnings_for(target_epsilon, target_delta, self.plan.public_size, self.plan.unit)
            for sentence in [*few, *([] if few else warnings_for(self.task))]:
                warnings.warn(sentence, stacklevel=2)
        if not self.plan.event.reasons and self.ranks.rank == 0 and self.planned_steps >= _WORTH_ADVICE and not _ADVISED:
            for note in self.notes:
                warnings.warn(note, Advice, stacklevel=2)
                _ADVISED.append(note)

    # --- training -----------------------------------------------------------------------------------------------------
    def batches(self, steps: int | None = None) -> Batches:
        """Private batches, each for one `step`: all that the plan still allows, or the next `steps` of them; `len` counts them."""
        end = self.planned_steps if steps is None else min(self.planned_steps, self.steps_taken + steps)
        if self.steps_taken >= self.planned_steps > 0:
            warnings.warn(
                f"all {self.planned_steps} planned steps are taken: there is no batch left. For a loop over epochs take "
                "engine.epochs(); for more steps plan them, by epochs or steps.",
                stacklevel=2,
            )
        return Batches(self._until(end), lambda: max(0, end - self.steps_taken))

    def epochs(self) -> Epochs:
        """The rest of the run by epochs: `for epoch in engine.epochs(): for x, y in epoch: engine.step(x, y)`."""
        return Epochs(self.batches, self.steps_per_epoch, lambda: (self.steps_taken, self.planned_steps))

    @property
    def steps_per_epoch(self) -> int:
        """After so many steps a record has been seen once on average."""
        return accounting.steps_of(1.0, self.sample_rate)

    def _until(self, end: int) -> Iterator[Batch]:
        while self.steps_taken < end:
            self._watch.check()
            if self._current is None:  # a batch that another loop left behind is not drawn again: that would be a choice
                waiting, self._ahead = self._ahead or self._drawn(), None
                with self._reading_randomness() if self.records.runs_user_code else nullcontext():
                    batch, rows = waiting()
                self._own, self._current = (batch, self._people_in(rows)), handed_out(batch)
                if self.records.read_ahead and self.ledger.steps < end:
                    self._ahead = self._drawn()
            yield self._current
            if self._current is not None:
                raise StepError(
                    "the last batch was not given to step(). Every batch goes through step(), empty ones too: leaving some out "
                    "would make the sampling depend on the data."
                )

    def step(self, inputs: Any, targets: Any) -> None:
        """One private step on the current batch of `batches()`, which is used up by it. It was charged before it was read."""
        number, (batch, people) = self.steps_taken, self._taken(inputs, targets)
        self._noise.prepare()
        with self._computing():
            public = self.fitted.draw_public(number)
            if people is None:
                total = self.fitted.sum_of_bounded_signals(batch, public, self._directions)
            else:
                total = self.fitted.sum_over_people(batch, people, public, self._directions)
            values = self.ranks.released(total, self._privatised, self.spacing)
            for observer in self._observers:
                observer(Released(number, public, values.clone()))
            if len(self._groups) == 1:
                self.fitted.gradients(values, public, self._buffers(self._groups[0]))
        if self._sets_rate:
            for settings in self.optimizer.param_groups:
                settings["lr"] = self.choice.rate_at(number, self.planned_steps)
        with self._watch.own_step():
            for group in self._groups:
                if len(self._groups) > 1:
                    with self._computing():
                        self.fitted.gradients(values, public, self._buffers(group))
                self._assign(group)
                self.optimizer.step()

    def _privatised(self, total: Any) -> Tensor:
        return self.fitted.privatise(total, self._noise.draw().to(self.forward.device))

    def release_sum(self, vectors: Callable[[Batch], Tensor], *, bound: float, release: GaussianRelease) -> Tensor:
        """The sum over all records of vectors of length at most `bound`, with noise of `release`: public from then on.

        It is charged before a record is read. A record whose vector can't be computed, or is not finite, adds nothing.
        """
        if self.ranks.size > 1 or self._current is not None or self._ahead is not None:
            raise StepError("a sum over all records is released by one process, after the last step.")
        if self.plan.unit == "person":
            raise InvalidArgument("a sum over all records protects records, and a person may have several: leave out unit=.")
        self._watch.check()
        void = [*self._reasons, *self.plan.event.reasons]
        self.ledger.append(Unaccounted(void[0]) if void else SampledStep(release, 1.0))
        std, total = release.noise_multiplier * bound, torch.zeros(release.numbers, dtype=torch.float64, device=self.forward.device)
        for start in range(0, self.records.size, _READ_AT_ONCE):
            with self._reading_randomness() if self.records.runs_user_code else nullcontext():
                batch = self.records.take(np.arange(start, min(start + _READ_AT_ONCE, self.records.size)))
            with self._computing():
                total += sum_of_vectors(self.forward, vectors, batch, WITH_MARGIN * bound, release.numbers)
        noise = self._source.noise(release.numbers).draw().to(self.forward.device)
        return on_grid(total.add_(noise, alpha=std), std)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Without gradients, in full precision, in the mode that was checked, with secret randomness in the model."""
        device, precision = self.forward.device, torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with (
                warnings.catch_warnings(action="ignore"),  # what a model warns of, and how often, depends on records
                torch.inference_mode(),
                torch.autocast(device.type, enabled=False),
                self.forward.checked_mode(),
                without_compiling(self.forward.model),
                self._model_randomness(device),
            ):
                yield
        finally:
            torch.set_float32_matmul_precision(precision)

    def on_release(self, observer: Callable[[Released], None]) -> Callable[[], None]:
        """Call `observer` with everything that each step makes public. Returns a function that ends this."""
        self._observers.append(observer)
        return lambda: self._observers.remove(observer)

    def _drawn(self) -> Callable[[], tuple[Batch, np.ndarray]]:
        """The next batch, to be waited for. The step is charged before anything is drawn for it, and before a record is read."""
        step = self.plan.at(self.ledger.steps)
        for reason in self.ranks.meet(self._reasons, self.ledger.steps, self.forward.parameters()):
            self._void(reason)
        event = Unaccounted(self._reasons[0]) if self._reasons else step.event
        self.ranks.charged(lambda: self.ledger.append(event))
        sampler = self._sampler.with_threshold(step.rejection_threshold)
        rows = self.ranks.rows(sampler, self._units, self._batch_rng)
        if self._membership is not None:
            rows = self._membership.rows(rows, self.plan.per_person, self._batch_rng)
        return self.records.start(rows)

    @cached_property
    def spacing(self) -> float | None:
        """The grid on which ranks send their shares as whole numbers; None where a sum may be too large for that."""
        bound = self.fitted.noise_std / self.plan.noise_multiplier if self.plan.noise_multiplier else math.inf
        return self.fitted.spacing(8 * self.plan.expected_batch_size * bound)

    @property
    def _units(self) -> int:
        """How many there are to sample from: records, or people."""
        return self.records.size if self._membership is None else self._membership.people

    def _people_of(self, dataset: Any, unit: Unit) -> Membership:
        """Who the records belong to: read as records are, with secret randomness."""
        if self.ranks.sharded:
            raise InvalidArgument(
                "unit= with sharded=True: a person's records may lie on two ranks. Give all ranks the whole data."
            )
        with self._reading_randomness():
            found = Membership.of(dataset, unit)
        if found.people == 0:
            raise DataError("unit says of no record who it belongs to: all labels are missing, or can't be read.")
        return found

    def _people_in(self, rows: np.ndarray) -> People | None:
        """Which of a batch's rows belong together, where a person may have several of them."""
        if self._membership is None or self.plan.per_person == 1:
            return None
        return People.of(self._membership.owners[rows], self.plan.per_person, self.forward.device)

    def _taken(self, inputs: Any, targets: Any) -> tuple[Batch, People | None]:
        """The engine's own copy of the current batch, if that is what was given; it is used up by that.

        So nothing that was done to what `batches` handed out has an effect.
        """
        if self._current is None or inputs is not self._current[0] or targets is not self._current[1]:
            raise StepError(
                "step() takes the current batch of engine.batches(), once, as it came. Another batch, or one used twice, was not "
                "sampled the way the guarantee assumes. What changes records (augmentation) belongs into the data set."
            )
        if self.steps_taken >= self.planned_steps:
            raise StepError(f"all {self.planned_steps} planned steps are taken; this one would exceed the budget.")
        self._current = None
        return self._own

    def _buffers(self, group: list[int]) -> Gradients:
        """For the gradients of these sites: where there are several groups, each has buffers for its own turn only."""
        if len(self._groups) > 1 or not self._gradients:
            with torch.inference_mode(False):  # what becomes .grad is a plain tensor
                self._gradients = [
                    {name: torch.zeros_like(p) for name, p in site.parameters.items()} if i in group else {}
                    for i, site in enumerate(self.forward.sites)
                ]
        return self._gradients

    def _assign(self, group: list[int]) -> None:
        """Hand the gradients to the optimizer. Whatever else stood there did not come from this step."""
        found: dict[nn.Parameter, Tensor] = {}
        for i in group:
            site, buffers = self.forward.sites[i], self._gradients[i]
            site.rule.leave_untrained(buffers)
            found |= {parameter: buffers[name] for name, parameter in site.parameters.items()}
        for parameters in self.optimizer.param_groups:
            for parameter in parameters["params"]:
                parameter.grad = found.get(parameter)

    @cached_property
    def notes(self) -> list[str]:
        """What a user should know of this mechanism on this model, in sentences. Found on synthetic records, so all is public."""
        self._watch.check()
        with warnings.catch_warnings(action="ignore"), self.forward.checked_mode():
            found = self.mechanism.notes(self.forward)
        self._watch.accept()  # it tries other weights, and puts them back
        return found

    # --- privacy ------------------------------------------------------------------------------------------------------
    @property
    def steps_taken(self) -> int:
        """Steps that are charged, but for those whose batches wait for `step` or are read ahead."""
        return self.ledger.steps - (self._current is not None) - (self._ahead is not None)

    @property
    def planned_steps(self) -> int:
        return self.plan.steps

    @property
    def noise_multiplier(self) -> float:
        return self.plan.at(self.steps_taken).noise_multiplier

    @property
    def sample_rate(self) -> float:
        return self.plan.sample_rate

    @property
    def expected_batch_size(self) -> float:
        return self.plan.expected_batch_size

    @property
    def target_epsilon(self) -> float | None:
        return self.plan.target_epsilon

    @property
    def target_delta(self) -> float:
        return self.plan.target_delta

    @property
    def guarantee(self) -> Guarantee:
        """What the epsilon of this run is worth, all of its ledger and the step to come included."""
        left = max(1, self.planned_steps - self.ledger.steps)
        planned = [*self.ledger.charges, Charge(self.plan.at(self.steps_taken).event, left)]
        return "none" if self._reasons else accounting.guarantee_of(planned, self.target_delta)

    def privacy_spent(self, delta: float | None = None) -> accounting.PrivacySpent:
        """What the steps so far have cost, as numbers and, printed, as a sentence."""
        return accounting.privacy_spent(
            self.ledger.charges,
            self.target_delta if delta is None else delta,
            reasons=self._reasons,
            public_size=self.plan.public_size,
            schema=str(self.records.schema),
            evaluation_epsilon=self.ledger.evaluation_epsilon,
        )

    def private_accuracy(self, dataset: Dataset[Any], *, epsilon: float) -> float:
        """The model's accuracy on private held-out records, 0 to 1, with noise. It costs `epsilon`, which `privacy_spent` includes.

        The number of right answers gets discrete Laplace noise; the number of held-out records is taken as public. Of several
        ranks, call it on rank 0 alone.
        """
        if self.plan.unit == "person":
            raise InvalidArgument(
                "a noisy accuracy protects records, and a person may have several among the held-out ones: evaluate on public data."
            )
        held_out = HeldOut(self.model, dataset)
        self.ledger.charge_evaluation(epsilon)
        return held_out.noisy_accuracy(epsilon)

    def parameters_changed(self, *, public: bool) -> None:
        """Say that parameters were changed between two steps. `public`: the new values are public, or were released by this run."""
        if not public:
            self._void("parameters were changed to values that are not public")
        self._watch.accept()

    def _agree(self, loss_fn: LossFunction, request: Request, settings: dict[str, Any]) -> None:
        """All ranks have the same model and the same settings, or nothing begins."""
        if self.ranks.size > 1:
            self.ranks.agree(
                facts(
                    model=self.model,
                    optimizer=self.optimizer,
                    loss_fn=loss_fn,
                    mechanism=self.mechanism,
                    request=request,
                    records=self.records,
                    ranks=self.ranks,
                    settings=settings,
                )
            )

    def _check_mechanism_from_outside(self, memory_limit: int | None, seed: int) -> None:
        """A mechanism that is none of the package's own is tried before it is believed."""
        if is_foreign(self.mechanism):
            trial = self.mechanism.fit(self.forward, self.plan, memory_limit=memory_limit, seed=seed)
            reason = check_mechanism(trial, self.forward, self.plan)
            self._watch.accept()  # it tries other weights, and puts them back
            if reason is not None:
                self._void(f"the mechanism {self.mechanism.name} comes from outside, and its bound could not be shown: {reason}")

    def _check_weights_are_taken(self, weights: WeightFunction | None, most: int) -> None:
        if weights is not None and not self.mechanism.takes_weights:
            raise InvalidArgument(f"the mechanism {self.mechanism.name} does not weigh records: leave out weights=.")
        if weights is not None and most > 1:  # a person is bounded by the mean over his or her records, which weights would change
            raise InvalidArgument("weights= with several records of a person: use max_per_person=1, or leave out weights=.")

    def _check_weights_of_loss(self, loss_fn: LossFunction) -> None:
        """Weights in a loss that would be forgotten without a word."""
        inputs, targets = self.forward.probe
        with torch.inference_mode(), self.forward.checked_mode():
            lost = None if self.mechanism.keeps_sizes else lost_weights(loss_fn, call_on_copy(self.model, inputs), targets)
        if lost is not None:
            raise InvalidArgument(
                f"{lost} of {type(loss_fn).__name__} would change nothing: the mechanism {self.mechanism.name} keeps only the sign "
                "of a difference of losses. Give the engine weights=dpulr.class_weights([...]) instead, or the mechanism "
                "kappa='adaptive' (docs/losses.md)."
            )

    def _void(self, reason: str) -> None:
        """From now on nothing is certified, and a warning says why."""
        if reason not in self._reasons:
            self._reasons.append(reason)
            warnings.warn(f"no guarantee any more: {reason}.", stacklevel=2)

    def __copy__(self) -> NoReturn:
        raise TypeError("an engine can't be copied: two would step on one batch, and count it once.")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()

    # --- resuming -----------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Parameters, optimizer and accounting. No random state: noise, directions and batches always start afresh."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ledger": self.ledger.to_dict(),
            "mechanism": self.fitted.state(),
            "run": self.run,
            "reasons": list(self._reasons),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a run, or go back to an earlier state of it. What was charged stays charged: in this process all of it counts.

        The plan shrinks if the target would be exceeded.
        """
        missing = [key for key in ("model", "optimizer", "ledger") if key not in state]
        if missing:
            raise InvalidArgument(
                f"this is not the state of an engine: it has no {missing[0]!r}. A model's own goes to model.load_state_dict()."
            )
        run = state.get("run")
        if run != self.run:
            if self.ledger.steps > 0:
                raise StepError(
                    f"this engine has charged {self.ledger.steps} steps, which a state of another run does not hold. To take over "
                    "other weights use model.load_state_dict(state['model']) and engine.parameters_changed(public=True): the "
                    "engine goes on counting."
                )
            self.run = run or self.run
            self.use_ledger(lambda: _largest(self.run, accounting.Ledger.from_dict(state["ledger"])))
        for reason in state.get("reasons", ()):
            self._void(str(reason))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.fitted.load_state(state.get("mechanism", {}))
        self._watch.accept()

    def use_ledger(self, given: accounting.Ledger | Callable[[], accounting.Ledger]) -> None:
        """Charge the steps to this ledger, one on disk for example. What it holds counts as spent.

        Of several ranks, rank 0 keeps it (only there a function that opens it is called), and the others copy what it holds.
        """
        if self.ledger.steps > 0:
            raise StepError(f"this engine has charged {self.ledger.steps} steps that the other ledger does not hold.")
        ledger = self.ranks.kept(given if callable(given) else lambda: given)
        unaccounted = [charge.step.reason for charge in ledger.charges if isinstance(charge.step, Unaccounted)]
        if unaccounted and self.target_epsilon is not None and not isinstance(self.plan.event, Unaccounted):
            raise BudgetError(f"no target_epsilon can be met on top of a ledger without a guarantee: {unaccounted[0]}.")
        self.ledger = _LEDGERS[self.run] = ledger
        if any(charge.step != self.plan.event for charge in ledger.charges):
            self.plan = self.plan.limited(ledger.charges)


_LEDGERS: dict[str, accounting.Ledger] = {}
"""The ledger of every run of this process: an engine that loads a state of one goes on with it, so that nothing is forgotten."""


def _largest(run: str, ledger: accounting.Ledger) -> accounting.Ledger:
    """The ledger that this process knows of a run, unless a stored state of it holds more."""
    known = _LEDGERS.get(run)
    return ledger if known is None or known.steps < ledger.steps else known


def _source(insecure_noise_seed: int | None, randomness: RandomSource | None, rank: int = 0) -> RandomSource:
    if insecure_noise_seed is not None:
        if randomness is not None:
            raise InvalidArgument("give insecure_noise_seed or randomness, not both.")
        validate.whole_number("insecure_noise_seed", insecure_noise_seed, 0)
        insecure_noise_seed += rank << 64  # each rank draws its own
    return RandomSource(insecure_noise_seed) if randomness is None else randomness
