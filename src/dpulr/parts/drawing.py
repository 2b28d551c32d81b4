"""Batches: each is charged, then sampled, then read, and handed out once. The engine computes on a copy of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np

from dpulr.distributed.ranks import Alone
from dpulr.errors import StepError
from dpulr.membership import Membership
from dpulr.model.batches import count, handed_out
from dpulr.model.forward import Forward
from dpulr.model.people import People
from dpulr.parts.account import Account
from dpulr.randomness import RandomSource
from dpulr.records import Records

Batch = tuple[Any, Any]


class Drawing:
    """The batches of a run. At most one is out, waiting for `taken`, and one more may be read ahead; both are charged."""

    def __init__(
        self,
        records: Records,
        membership: Membership | None,
        *,
        account: Account,
        ranks: Alone,
        source: RandomSource,
        forward: Forward,
        rows_of: Callable[[int], int],
    ) -> None:
        """`rows_of`: how many rows a pass for so many records will have."""
        self.records, self._membership = records, membership
        self._account, self._ranks, self._forward, self._rows_of = account, ranks, forward, rows_of
        self._sampler, self._rng = account.plan.sampler(), ranks.batch_stream(source)
        self._reading = source.reading_randomness
        self._reads_ahead = any(ranks.gathered(records.read_ahead))  # then all do: each charge is a meeting of all ranks
        self._own: tuple[Batch, People | None] = ((), ()), None
        self._current: Batch | None = None
        self._ahead: Callable[[], tuple[Batch, np.ndarray]] | None = None

    @property
    def waiting(self) -> int:
        """Batches that are charged, but not used up."""
        return (self._current is not None) + (self._ahead is not None)

    @property
    def steps_taken(self) -> int:
        return self._account.ledger.steps - self.waiting

    def until(self, end: int, check: Callable[[], None]) -> Iterator[Batch]:
        """One batch after the other, until so many steps are taken. `check` is called before each."""
        while self.steps_taken < end:
            check()
            if self._current is None:  # a batch that another loop left behind is not drawn again: that would be a choice
                waiting, self._ahead = self._ahead or self._drawn(), None
                with self._reading() if self.records.runs_user_code else nullcontext():
                    batch, rows = waiting()
                self._forward.fill_room(batch, self._rows_of(count(batch[1])))
                self._own, self._current = (batch, self._people_in(rows)), handed_out(batch)
                if self._reads_ahead and self._account.ledger.steps < end:
                    self._ahead = self._drawn()
            yield self._current
            if self._current is not None:
                raise StepError(
                    "the last batch was not given to step(). Every batch goes through step(), empty ones too: leaving some out "
                    "would make the sampling depend on the data."
                )

    def taken(self, inputs: Any, targets: Any) -> tuple[Batch, People | None]:
        """The engine's own copy of the current batch, if that is what was given; it is used up by that.

        So nothing that was done to what was handed out has an effect.
        """
        if self._current is None or inputs is not self._current[0] or targets is not self._current[1]:
            raise StepError(
                "step() takes the current batch of engine.batches(), once, as it came. Another batch, or one used twice, was not "
                "sampled the way the guarantee assumes. What changes records (augmentation) belongs into the data set."
            )
        planned = self._account.plan.steps
        if self.steps_taken >= planned:
            raise StepError(f"all {planned} planned steps are taken; this one would exceed the budget.")
        self._current = None
        return self._own

    def read(self, first: int, last: int) -> Batch:
        """These records of the data set, sampled or not."""
        with self._reading() if self.records.runs_user_code else nullcontext():
            return self.records.take(np.arange(first, last))

    def _drawn(self) -> Callable[[], tuple[Batch, np.ndarray]]:
        """The next batch, to be waited for. The step is charged before anything is drawn for it, and before a record is read."""
        account = self._account
        step = account.charge_step(self._forward.parameters())
        sampler = self._sampler.with_threshold(step.rejection_threshold)
        if self._membership is None:
            rows = self._ranks.rows(sampler, self.records.size, self._rng)
        else:
            people = self._ranks.rows(sampler, self._membership.people, self._rng)
            rows = self._membership.rows(people, step.per_person, self._rng)
        return self.records.start(rows)

    def _people_in(self, rows: np.ndarray) -> People | None:
        """Which of a batch's rows belong together, where a person may have several of them."""
        most = self._account.plan.per_person
        if self._membership is None or most == 1:
            return None
        return People.of(self._membership.owners[rows], most, self._forward.device)
