"""`Forward`: a model that has passed all checks, ready to run. It is finished when it is made (model/prepare.py).

A record whose pass raises gets NaN, and the others what they would have got without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpulr.model.batches import call_on_copy, copied, count, fill_room, row, rows, tensors
from dpulr.model.equal_rows import EqualRows
from dpulr.model.layers import Call
from dpulr.model.passes import Clean, Move, Passes, Shift
from dpulr.model.people import People
from dpulr.model.rescue import each_alone, filled, not_too_few, of_each, together_or_apart, without_raising
from dpulr.model.shared_sites import RepeatedSite
from dpulr.model.sites import Site
from dpulr.model.weights import RecordWeights, WeightFunction
from dpulr.model.whole_passes import RecordwisePasses

Size = Callable[[int], int]
"""How many rows a pass for so many records has."""


class Forward:
    """Losses of records under noise at sites.

    bytes_per_record  what a clean pass allocates for one record
    replay_bytes      for each site, what a pass from there to the loss allocates for one record
    probe             synthetic inputs and targets
    uses              for each site, the numbers of its layers' calls: one, unless its parameters are shared
    weights           what each record's signal is multiplied by, at most 1; None: all count alike
    """

    def __init__(
        self,
        passes: Passes,
        sites: Sequence[Site],
        *,
        bytes_per_record: int,
        replay_bytes: Sequence[int],
        probe: tuple[Any, Any],
        uses: Sequence[Sequence[int]] | None = None,
        weights: WeightFunction | None = None,
    ) -> None:
        self.uses = [[i] for i in range(len(sites))] if uses is None else [list(members) for members in uses]
        self.passes, self.sites = passes, tuple(sites)
        self.bytes_per_record, self.replay_bytes, self.probe = bytes_per_record, tuple(replay_bytes), probe
        self.model, self.loss_fn = passes.model, passes.loss_fn
        some = next(iter(self.sites[0].parameters.values()))
        self.device, self.dtype = some.device, some.dtype
        self._nobody = row(probe, 0)
        self.weights = None if weights is None else RecordWeights(weights, probe[1], self.dtype)
        self._modes = [(module, module.training) for module in self.model.modules() if hasattr(module, "training")]

    @property
    def recordwise(self) -> bool:
        """Whether the model sees one record at a time."""
        return isinstance(self.passes, RecordwisePasses)

    @contextmanager
    def checked_mode(self) -> Iterator[None]:
        """Every module in the mode (training or not) in which it was checked, whatever mode the user left it in."""
        changed = [(module, wanted) for module, wanted in self._modes if module.training != wanted]
        try:
            for module, training in changed:
                module.training = training
            yield
        finally:
            for module, training in changed:
                module.training = not training

    def fill_room(self, batch: tuple[Any, Any], rows: int) -> None:
        """Fill a batch that has room up to so many rows now, while nobody else has it: `clean` then need not copy it."""
        fill_room(batch, self._nobody, rows - count(batch[1]))

    def clean(
        self,
        inputs: Any,
        targets: Any,
        backward_to: Sequence[int] = (),
        people: People | None = None,
        *,
        rows_of: Size | None = None,
    ) -> list[Clean]:
        """Clean passes over the records for which they don't raise: one for all; or one per record (or person), where no joint
        pass succeeds.

        A model that reads values sees one record at a time anyway: what it does with one says nothing about the next.
        `backward_to` are layers at whose outputs the gradient is wanted (`slopes`). A pass for n records has
        `rows_of(n)` rows: it is filled up with synthetic ones, which say nothing (model/row_sizes.py).
        """
        records, everybody = count(targets), (inputs, targets)

        def run(batch: tuple[Any, Any], people: People | None, raised: Sequence[int] = (), *, fill: bool = True) -> Clean:
            own = count(batch[1])
            more = rows_of(own) - own if fill and rows_of is not None and not self.recordwise else 0
            clean = self._clean(filled(batch, self._nobody, absent=raised, more=more), backward_to)
            clean.people = None if people is None else people.joined_by(more)
            clean.alone = 1 if rows_of is None else rows_of(1)
            behind = range(own, own + more)
            return clean.leave_out([*raised, *behind] if raised else behind)

        def apart() -> list[Clean]:
            found: list[Clean] = []

            def person(own: People, start: int, stop: int) -> None:
                part = rows(everybody, start, stop)
                clean = together_or_apart(lambda: run(part, own), lambda: survivors(part, own), alive=lambda: None)
                found.extend([] if clean is None else [clean])

            if people is None:
                each_alone(range(records), lambda i: found.append(run(row(everybody, i), None)))
            else:
                each_alone(range(people.count), lambda i: person(*people.part(i, i + 1)))
            return found

        def survivors(batch: tuple[Any, Any], people: People | None) -> Clean | None:
            return without_raising(
                range(count(batch[1])),
                lambda i: run(row(batch, i), None, fill=False),
                lambda raised: run(batch, people, raised),
            )

        def others() -> list[Clean]:
            clean = survivors(everybody, people)
            return apart() if clean is None else [clean]

        if self.recordwise:
            alone = apart()
            if not alone and records:
                self.check_alive([0])
            return alone
        return together_or_apart(lambda: [run(everybody, people)], others, lambda: self.check_alive([0]))

    def _clean(self, batch: tuple[Any, Any], backward_to: Sequence[int]) -> Clean:
        if not backward_to:
            return self.passes.clean(*batch)
        clean, slopes = self.differentiated(batch, backward_to)
        clean.slopes = [
            torch.zeros_like(clean.calls[i].output) if slope is None else slope
            for i, slope in zip(backward_to, slopes, strict=True)
        ]
        return clean

    def differentiated(self, batch: tuple[Any, Any], indices: Sequence[int]) -> tuple[Clean, list[Tensor | None]]:
        """A clean pass, and by one backward pass the gradients at the outputs of these layers; None where none arrives."""
        with self.passes.recorded(indices):
            made_without = any(leaf.is_inference() for part in batch for leaf in tensors(part))
            clean = self.passes.clean(*(copied(batch) if made_without else batch))
            outputs = [clean.calls[i].output for i in indices]
            if not clean.losses.requires_grad:
                return clean.detached(), [None] * len(outputs)
            slopes = torch.autograd.grad(clean.losses.sum(), outputs, allow_unused=True)
        return clean.detached(), list(slopes)

    def weight_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Plain gradients of the probe's losses in all trained parameters. All rows draw the same random numbers."""
        records, parameters = count(self.probe[1]), self.parameters()
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(), EqualRows(records):
            losses = self.passes.clean(*self.probe).losses
            found = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
        return {p: torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)}

    def calls(self, clean: Clean) -> list[Call]:
        """The call of each site; all calls of a layer that is called again, as one."""
        return [
            site.joint([clean.calls[i] for i in members]) if isinstance(site, RepeatedSite) else clean.calls[members[0]]
            for site, members in zip(self.sites, self.uses, strict=True)
        ]

    def losses(self, clean: Clean, index: int, moved: Tensor) -> Tensor:
        """(repeats, records) losses when the output of one site is `moved` (repeats, records, *out)."""
        return self.all_losses(clean, [Move(self.uses[index][0], moved)])[0]

    def all_losses(self, clean: Clean, moves: Sequence[Move]) -> Tensor:
        """(moves, repeats, records) losses, one move at a time; all have as many repeats. Non-finite ones stay so."""

        def apart() -> Tensor:
            repeats = moves[0].moved.shape[0]
            losses = clean.losses.new_full((len(moves), repeats, clean.records), math.nan)
            alone = self._clean_alone(clean)

            def one(place: tuple[int, int, int], least: int = 1) -> None:
                i, m, r = place
                own = alone(i, least)
                losses[m, r, i] = self.passes.losses(own, [moves[m].one(r, i).among(own)])[0, 0, 0]

            def others(raised: list[tuple[int, int, int]]) -> Tensor:
                own = [self._unmoved(move, clean, [(r, i) for i, n, r in raised if n == m]) for m, move in enumerate(moves)]
                found = self.passes.losses(clean, own)
                for i, m, r in raised:
                    found[m, r, i] = math.nan
                return found

            places = list(product(range(clean.records), range(len(moves)), range(repeats)))
            joint = without_raising(places, one, others)
            if joint is None and not self.recordwise:
                losses.fill_(math.nan)
                each_alone(places, partial(one, least=clean.alone))
            return losses if joint is None else joint

        alive = [move.site_index for move in moves]
        losses = together_or_apart(lambda: self.passes.losses(clean, moves), apart, lambda: self.check_alive(alive))
        clean.silence(losses, math.nan)
        return losses

    def _unmoved(self, move: Move, clean: Clean, places: Sequence[tuple[int, int]]) -> Move:
        """The same move, but with nothing moved for these (repeat, record)."""
        if not places:
            return move
        moved, also = move.moved.clone(), [shift._replace(delta=shift.delta.clone()) for shift in move.also]
        for r, i in places:
            moved[r, i] = clean.calls[move.site_index].output[i]
            for shift in also:
                shift.delta[r, i] = 0
        return move._replace(moved=moved, also=also)

    def losses_with(self, weights: dict[str, Tensor], inputs: Any, targets: Any) -> Tensor:
        """One loss per record with these parameters, by name; NaN for a record whose pass raises. For mechanisms from outside."""

        def run(inputs: Any, targets: Any) -> Tensor:
            def model(*args: Any, **kwargs: Any) -> Any:
                return functional_call(self.model, weights, args, kwargs)

            found: Tensor = self.loss_fn(call_on_copy(model, inputs), targets)
            return found

        return self.loss_of_each(run, inputs, targets, alone=self.recordwise, alive=lambda: self.check_alive([0]))

    def loss_of_each(
        self,
        run: Callable[[Any, Any], Tensor],
        inputs: Any,
        targets: Any,
        *,
        alone: bool,
        alive: Callable[[], None],
        size: Size = not_too_few,
    ) -> Tensor:
        """`run(inputs, targets)`, one loss per record; NaN for a record for which it raises. `alone`: one record at a time."""
        nan = torch.full((count(targets),), math.nan, dtype=self.dtype, device=self.device)
        batch = (inputs, targets)
        return of_each(lambda part: run(*part), batch, self._nobody, nan, alone=alone, alive=alive, size=size)

    def all_shifted(self, clean: Clean, deltas: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """(repeats, records) losses with every site shifted in one pass, and the inputs that the sites saw (0 where it raised)."""
        shifts = [Shift(i, site, delta) for i, (site, delta) in enumerate(zip(self.sites, deltas, strict=True))]

        def apart() -> tuple[Tensor, list[Tensor]]:
            repeats, records = deltas[0].shape[:2]
            losses = clean.losses.new_full((repeats, records), math.nan)
            inputs = [call.input.new_zeros(repeats, *call.input.shape) for call in clean.calls]
            alone = self._clean_alone(clean)

            def one(place: tuple[int, int]) -> None:
                r, i = place
                own = [Shift(n, site, delta[r : r + 1, i : i + 1]) for n, site, delta in shifts]
                losses[r, i], seen = self.passes.all_shifted(alone(i), own)
                for all_rows, own_row in zip(inputs, seen, strict=True):
                    all_rows[r, i] = own_row[0]

            each_alone(product(range(repeats), range(records)), one)
            return losses, [all_rows.flatten(0, 1) for all_rows in inputs]

        losses, seen = together_or_apart(lambda: self.passes.all_shifted(clean, shifts), apart, lambda: self.check_alive([0]))
        clean.silence(losses, math.nan)
        return losses, seen

    def weighed(self, scale: Tensor, targets: Any) -> Tensor:
        """Factors (..., records) of records' signals, times the records' weights."""
        return scale if self.weights is None else scale * self.weights(targets).to(scale)

    def _clean_alone(self, clean: Clean) -> Any:
        @cache
        def alone(i: int, least: int = 1) -> Clean:
            return self.passes.clean(*filled(row((clean.inputs, clean.targets), i), self._nobody, more=least - 1))

        return alone

    def check_alive(self, indices: Sequence[int]) -> None:
        """A black box that is down raises on synthetic inputs, too. That says nothing about a record, so that error may be seen."""
        clean = self.passes.clean(*row(self.probe, 0))
        if indices:
            self.passes.losses(clean, [Move(index, clean.calls[index].output.unsqueeze(0)) for index in indices])

    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters, site by site."""
        return [parameter for site in self.sites for parameter in site.parameters.values()]
