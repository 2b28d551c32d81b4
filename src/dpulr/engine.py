"""`PrivacyEngine`: private steps on a model that is never wrapped, with any torch optimizer.

`step` reads from top to bottom: the batch, a draw in public, the sum of bounded signals, noise, gradients, optimizer. What it is
made of lies in `parts/`. The engine stops before the step that would exceed the target epsilon.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Never, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpulr import accounting
from dpulr.accounting.events import GaussianRelease
from dpulr.accounting.statement import Guarantee
from dpulr.allocator import give_back
from dpulr.auto import choose
from dpulr.distributed.facts import described, gathered_records
from dpulr.distributed.launch import RANK_TIMEOUT
from dpulr.distributed.ranks import join
from dpulr.errors import InvalidArgument, StepError
from dpulr.mechanisms import Mechanism, by_name
from dpulr.mechanisms.base import WITH_MARGIN, noised
from dpulr.membership import Unit
from dpulr.model.black_box import stand_ins
from dpulr.model.each_record import EachRecord, OfRecords, sum_of_vectors
from dpulr.model.losses import LossFunction
from dpulr.model.opaque import uncompiled
from dpulr.model.prepare import prepare
from dpulr.model.trained_layers import check_optimizer, find_layers
from dpulr.model.weights import WeightFunction
from dpulr.parts import misuse, setup
from dpulr.parts.account import Account
from dpulr.parts.computing import computing, exact_arithmetic, trying
from dpulr.parts.drawing import Batch, Drawing
from dpulr.parts.loops import Batches, Epochs
from dpulr.parts.misuse import Watch
from dpulr.parts.task import task_of
from dpulr.parts.updates import Updates
from dpulr.plan import Plan, Request, Sampling
from dpulr.private_scores import HeldOut
from dpulr.randomness import RandomSource
from dpulr.records import Records

_READ_AT_ONCE = 1_000


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
        rank_timeout: float = RANK_TIMEOUT,
        unit: Unit = None,
        max_per_person: int = 8,
        **unknown: Never,
    ) -> None:
        misuse.refuse(unknown)
        self.ranks = join(process_group, timeout=rank_timeout, sharded=sharded, parallel=parallel, shared_noise=shared_noise)
        source = self._source = setup.secret_source(insecure_noise_seed, randomness, self.ranks.rank)
        setup.check_numbers(seed=seed, memory_limit=memory_limit, max_per_person=max_per_person)
        per_person = 1 if unit is None else max_per_person
        self.mechanism = by_name(mechanism).for_people(per_person)
        self.model, self.optimizer, self._sets_rate = model, setup.optimizer_of(model, optimizer), optimizer == "auto"
        shared = self.mechanism.shares_parameters
        find_layers(uncompiled(model), shared=shared)  # names what can't be trained at all, before the data set is opened
        device = check_optimizer(model, self.optimizer)
        records = gathered_records(dataset, device, schema, self.ranks, num_workers=num_workers)
        membership = None if unit is None else setup.people_of(dataset, unit, self.ranks, source)
        counted = records.size if membership is None else membership.people
        counted = sum(self.ranks.gathered(counted)) if sharded else counted
        open_size = batch_size is expected_batch_size is sample_rate is None
        request = Request(
            records=counted,
            batch_size=counted if open_size else batch_size,
            expected_batch_size=expected_batch_size,
            sample_rate=sample_rate,
            epochs=epochs,
            steps=steps,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            noise_multiplier=noise_multiplier,
            sampling=sampling,
            rejection_threshold=rejection_threshold,
            min_dataset_size=min_dataset_size,
            void=source.reason_for_none or records.reason_for_none,
            unit="record" if unit is None else "person",
            per_person=per_person,
        )
        setup.check_weights_are_taken(weights, self.mechanism, per_person)
        self.forward = prepare(
            model,
            loss_fn,
            records.example,
            device,
            space=self.mechanism.space,
            method=replay,
            shared=shared,
            again=self.mechanism.calls_again,
            weights=weights,
            sites=self.mechanism.uses_sites,
            rows=setup.rows_of_a_pass(request),
        )
        give_back()
        setup.check_weights_of_loss(loss_fn, self.mechanism, self.forward, model)
        self.task, size = task_of(self.mechanism, self.forward, self.optimizer, request)
        repeats = getattr(self.mechanism, "repeats", None)
        self.choice = choose(
            self.task, batch_size=None if open_size else size, repeats=repeats if isinstance(repeats, int) else None
        )
        if open_size:
            request = replace(request, batch_size=self.choice.batch_size)
        self.mechanism = self.mechanism.with_repeats(self.choice.repeats).settled(self.forward)
        setup.agree(
            self.ranks,
            membership,
            {"seed": seed, "replay": replay, "insecure_noise_seed": insecure_noise_seed, "weights": described(weights)},
            model=model,
            optimizer=self.optimizer,
            loss_fn=loss_fn,
            mechanism=self.mechanism,
            request=request,
            records=records,
        )
        plan = self.ranks.shared(lambda: self.mechanism.plan(request, self.forward.sites))
        self.fitted = self.mechanism.fit(self.forward, plan, memory_limit=memory_limit, seed=seed)
        setup.share(self.fitted, request, self.ranks)
        self._account = Account(plan, self.ranks)
        trained = self.forward.parameters()
        frozen = [parameter for parameter in model.parameters() if parameter not in set(trained)]
        self._watch = Watch(self.optimizer, trained, self._account.void, frozen)
        self._drawing = Drawing(
            records,
            membership,
            account=self._account,
            ranks=self.ranks,
            source=source,
            forward=self.forward,
            rows_of=self.fitted.rows_known,
        )
        self._noise, self._directions = self.fitted.noise(source), source.directions(device, self.forward.dtype)
        self._updates = Updates(self.forward, self.fitted, self.optimizer)
        self._observers: list[Callable[[Released], None]] = []
        if ledger is not None:
            self.use_ledger(lambda: setup.opened_ledger(ledger, plan))
        against = setup.reason_against(self.mechanism, self.forward, self.plan, memory_limit=memory_limit, seed=seed)
        self._watch.accept()  # a mechanism from outside was tried with other weights, which were put back
        if against is not None:
            self._account.void(against)
        if self.ranks.rank == 0:
            setup.warn_of_weak_settings(self.plan, self.task, target_epsilon, stacklevel=2)
        self.advises = self.ranks.rank == 0  # whether `notes` are said, as a warning

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
        return Batches(self._drawing.until(end, self._before_batch), lambda: max(0, end - self.steps_taken))

    def _before_batch(self) -> None:
        self._watch.check()
        if self.advises and self.steps_taken == 1:  # nobody waits for it before the first step
            setup.advise(self.plan, lambda: self.notes, stacklevel=4)

    def epochs(self) -> Epochs:
        """The rest of the run by epochs: `for epoch in engine.epochs(): for x, y in epoch: engine.step(x, y)`."""
        return Epochs(self.batches, self.steps_per_epoch, lambda: (self.steps_taken, self.planned_steps))

    def step(self, inputs: Any, targets: Any) -> None:
        """One private step on the current batch of `batches()`, which is used up by it. It was charged before it was read."""
        number, (batch, people) = self.steps_taken, self._drawing.taken(inputs, targets)
        device = self.forward.device
        self._noise.prepare()
        if not self.fitted.rows_settled:
            with trying(self.forward):
                slow = self.fitted.settle_rows()
            give_back()
            if slow is not None:
                warnings.warn(slow, stacklevel=2)
        with computing(self.forward, self._source):
            public = self.fitted.draw_public(number)
            if people is None:
                total = self.fitted.sum_of_bounded_signals(batch, public, self._directions)
            else:
                total = self.fitted.sum_over_people(batch, people, public, self._directions)
            values = self.ranks.released(total, lambda own: self.fitted.privatise(own, self._noise.draw().to(device)), self.spacing)
            for observer in self._observers:
                observer(Released(number, public, values.clone()))
        if self._sets_rate:
            for settings in self.optimizer.param_groups:
                settings["lr"] = self.choice.rate_at(number, self.planned_steps)
        with self._watch.own_step():
            for group in self._updates.groups:
                with exact_arithmetic(device):
                    self.fitted.gradients(values, public, self._updates.buffers(group))
                self._updates.assign(group, self.optimizer)
                self.optimizer.step()

    def on_release(self, observer: Callable[[Released], None]) -> Callable[[], None]:
        """Call `observer` with everything that each step makes public. Returns a function that ends this."""
        self._observers.append(observer)
        return lambda: self._observers.remove(observer)

    def release_sum(self, vectors: Callable[[Batch], Tensor], *, bound: float, release: GaussianRelease) -> Tensor:
        """The sum over all records of vectors of length at most `bound`, with noise of `release`: public from then on.

        It is charged before a record is read. A record whose vector can't be computed, or is not finite, adds nothing. Refused are
        vectors that depend on other records.
        """
        if self.ranks.size > 1 or self._drawing.waiting:
            raise StepError("a sum over all records is released by one process, after the last step.")
        if self.plan.unit == "person":
            raise InvalidArgument("a sum over all records protects records, and a person may have several: leave out unit=.")
        self._watch.check()
        records, device, example = self.records.size, self.forward.device, self.records.example
        with trying(self.forward), stand_ins(self.model):
            each = EachRecord(OfRecords(self.forward.model, vectors), (example, example[1]), device)
        self._account.charge_all_records(release)
        total = torch.zeros(release.numbers, dtype=torch.float64, device=device)
        for start in range(0, records, _READ_AT_ONCE):
            batch = self._drawing.read(start, min(start + _READ_AT_ONCE, records))
            with computing(self.forward, self._source):
                total += sum_of_vectors(each, batch, WITH_MARGIN * bound, release.numbers)
        return noised(total, self._source.noise(release.numbers).draw().to(device), release.noise_multiplier * bound)

    @cached_property
    def spacing(self) -> float | None:
        """The grid on which ranks send their shares as whole numbers; None where a sum may be too large for that."""
        bound = self.fitted.noise_std / self.plan.noise_multiplier if self.plan.noise_multiplier else math.inf
        return self.fitted.spacing(8 * self.plan.expected_batch_size * bound)

    @cached_property
    def notes(self) -> list[str]:
        """What a user should know of this mechanism on this model, in sentences. Found on synthetic records, so all is public."""
        self._watch.check()
        with warnings.catch_warnings(action="ignore"), self.forward.checked_mode():
            found = self.mechanism.notes(self.forward)
        self._watch.accept()  # it tries other weights, and puts them back
        return found

    # --- the plan -----------------------------------------------------------------------------------------------------
    @property
    def plan(self) -> Plan:
        """Rate, steps, noise and what is charged. It changes only by shrinking, on top of a ledger that holds something."""
        return self._account.plan

    @property
    def records(self) -> Records:
        return self._drawing.records

    @property
    def steps_taken(self) -> int:
        """Steps that are charged, but for those whose batches wait for `step` or are read ahead."""
        return self._drawing.steps_taken

    @property
    def steps_per_epoch(self) -> int:
        """After so many steps a record has been seen once on average."""
        return accounting.steps_of(1.0, self.sample_rate)

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

    # --- privacy ------------------------------------------------------------------------------------------------------
    @property
    def ledger(self) -> accounting.Ledger:
        """What was charged, in order."""
        return self._account.ledger

    @property
    def run(self) -> str:
        """The name of the run, by which a stored state of it is known again."""
        return self._account.run

    @property
    def reasons(self) -> list[str]:
        """Why nothing of this run is certified any more, if so."""
        return list(self._account.reasons)

    @property
    def guarantee(self) -> Guarantee:
        """What the epsilon of this run is worth, all of its ledger and the step to come included."""
        return self._account.guarantee(self.steps_taken)

    def privacy_spent(self, delta: float | None = None) -> accounting.PrivacySpent:
        """What the steps so far have cost, as numbers and, printed, as a sentence."""
        return self._account.spent(delta, schema=str(self.records.schema))

    def private_accuracy(self, dataset: Dataset[Any], *, epsilon: float) -> float:
        """The model's accuracy on private held-out records, 0 to 1, with noise. It costs `epsilon`, which `privacy_spent` includes.

        The number of right answers gets discrete Laplace noise; the number of held-out records is taken as public. Of several
        ranks, call it on rank 0 alone, and ask that one what was spent.
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
            self._account.void("parameters were changed to values that are not public")
        self._watch.accept()

    def use_ledger(self, given: accounting.Ledger | Callable[[], accounting.Ledger]) -> None:
        """Charge the steps to this ledger, one on disk for example. What it holds counts as spent.

        Of several ranks, rank 0 keeps it (only there a function that opens it is called), and the others copy what it holds.
        """
        self._account.use(given)

    # --- resuming -----------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Parameters, optimizer and accounting. No random state: noise, directions and batches always start afresh."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "mechanism": self.fitted.state(),
            **self._account.state(),
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
        self._account.load(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.fitted.load_state(state.get("mechanism", {}))
        self._watch.accept()

    def __copy__(self) -> NoReturn:
        raise TypeError("an engine can't be copied: two would step on one batch, and count it once.")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()
