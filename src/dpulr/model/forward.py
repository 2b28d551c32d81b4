"""`Forward`: a model that has passed all checks, ready to run. It is finished when it is made (model/prepare.py).

A record whose pass raises gets NaN, and the others what they would have got without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpulr.model.batches import copied, count, row, rows
from dpulr.model.equal_rows import EqualRows
from dpulr.model.layers import Call
from dpulr.model.passes import Clean, Move, Passes, Shift
from dpulr.model.people import People
from dpulr.model.rescue import each_alone, together_or_apart
from dpulr.model.shared_sites import RepeatedSite
from dpulr.model.sites import Site
from dpulr.model.weights import RecordWeights, WeightFunction
from dpulr.model.whole_passes import RecordwisePasses


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

    def clean(self, inputs: Any, targets: Any, backward_to: Sequence[int] = (), people: People | None = None) -> list[Clean]:
        """Clean passes over the records for which they don't raise: one for all; or one per record (or person), where
        the joint pass raises.

        A model that reads values sees one record at a time anyway: what it does with one says nothing about the next.
        `backward_to` are layers at whose outputs the gradient is wanted (`slopes`).
        """

        def run(batch: tuple[Any, Any], people: People | None) -> Clean:
            if not backward_to:
                clean = self.passes.clean(*batch)
                clean.people = people
                return clean
            clean, slopes = self.differentiated(batch, backward_to)
            clean.people = people
            clean.slopes = [
                torch.zeros_like(clean.calls[i].output) if slope is None else slope
                for i, slope in zip(backward_to, slopes, strict=True)
            ]
            return clean

        def apart() -> list[Clean]:
            found: list[Clean] = []
            if people is None:
                each_alone(range(count(targets)), lambda i: found.append(run(row((inputs, targets), i), None)))
                return found
            own = (people.part(i, i + 1) for i in range(people.count))
            each_alone(own, lambda part: found.append(run(rows((inputs, targets), *part[1:]), part[0])))
            return found

        if self.recordwise:
            alone = apart()
            if not alone and count(targets):
                self.check_alive([0])
            return alone
        return together_or_apart(lambda: [run((inputs, targets), people)], apart, lambda: self.check_alive([0]))

    def differentiated(self, batch: tuple[Any, Any], indices: Sequence[int]) -> tuple[Clean, list[Tensor | None]]:
        """A clean pass, and by one backward pass the gradients at the outputs of these layers; None where none arrives."""
        with self.passes.recorded(indices):
            made_without = any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in pytree.tree_leaves(batch))
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

            def one(place: tuple[int, int, int]) -> None:
                i, m, r = place
                losses[m, r, i] = self.passes.losses(alone(i), [moves[m].one(r, i)]).squeeze()

            each_alone(product(range(clean.records), range(len(moves)), range(repeats)), one)
            return losses

        alive = [move.site_index for move in moves]
        return together_or_apart(lambda: self.passes.losses(clean, moves), apart, lambda: self.check_alive(alive))

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

        return together_or_apart(lambda: self.passes.all_shifted(clean, shifts), apart, lambda: self.check_alive([0]))

    def weighed(self, scale: Tensor, targets: Any) -> Tensor:
        """Factors (..., records) of records' signals, times the records' weights."""
        return scale if self.weights is None else scale * self.weights(targets).to(scale)

    def _clean_alone(self, clean: Clean) -> Any:
        @cache
        def alone(i: int) -> Clean:
            return self.passes.clean(*row((clean.inputs, clean.targets), i))

        return alone

    def check_alive(self, indices: Sequence[int]) -> None:
        """A black box that is down raises on synthetic inputs, too. That says nothing about a record, so that error may be seen."""
        clean = self.passes.clean(*row(self.probe, 0))
        if indices:
            self.passes.losses(clean, [Move(index, clean.calls[index].output.unsqueeze(0)) for index in indices])

    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters, site by site."""
        return [parameter for site in self.sites for parameter in site.parameters.values()]


def sum_of_vectors(forward: Forward, vectors: Callable[[Any], Tensor], batch: tuple[Any, Any], longest: float, size: int) -> Tensor:
    """The sum over records of vectors (records, size), each shortened to `longest`; 0 where that raises, or gives no number."""

    def apart() -> Tensor:
        found = torch.zeros(count(batch[1]), size, dtype=torch.float64, device=forward.device)

        def one(i: int) -> None:
            found[i] = vectors(row(batch, i))[0]

        each_alone(range(len(found)), one)
        return found

    together = apart if forward.recordwise else lambda: vectors(batch)
    found = together_or_apart(together, apart, lambda: forward.check_alive([0])).double()
    found = torch.where(torch.isfinite(found).all(1, keepdim=True), found, 0)
    lengths = torch.linalg.vector_norm(found, dim=1, keepdim=True)
    total: Tensor = (found * (longest / lengths.clamp_min(longest))).sum(0)
    return total
