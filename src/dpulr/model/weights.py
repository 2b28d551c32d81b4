"""Weights of records: a public function of the target. A record's bounded signal is multiplied by its weight, which is at most 1.

So weights act whatever a mechanism keeps of a loss, a sign included, and no bound changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.model.batches import count, described, row, tensors, tile
from dpulr.model.each_record import OfRecords, row_sums
from dpulr.model.rescue import of_each
from dpulr.model.row_independence import check_rows
from dpulr.model.value_reads import observe

WeightFunction = Callable[[Any], Any]
_TIMES = (1, 5, 200, 4_000)
_OF_THE_BATCH = "weights must depend on a record's own target alone; on synthetic targets they depend on the batch."


def class_weights(weights: Sequence[float]) -> WeightFunction:
    """For `PrivacyEngine(weights=...)`: a weight for each class, divided by the largest of them. They must be public."""
    table = torch.tensor([float(weight) for weight in weights], dtype=torch.float64)
    if table.dim() != 1 or len(table) < 2 or not bool((torch.isfinite(table) & (table >= 0)).all()) or not bool(table.any()):
        raise InvalidArgument(f"weights is {list(weights)!r}; it must be a number of at least 0 for each class, not all of them 0.")
    table = table / table.max()
    return lambda targets: table.to(targets.device)[targets.long()]


class RecordWeights:
    """The weight of each record, in [0, 1]. 0 where the function raises or gives no number: nothing is said about that record."""

    def __init__(self, function: WeightFunction, targets: Any, dtype: torch.dtype) -> None:
        """`targets` are synthetic: the function is tried on them, together, one by one, and each of them many times.

        Then it is tried as a model is. One that reads values, as `if targets.max() > 5` does, sees one target at a time.
        """
        self._function, self._dtype, self._trial = function, dtype, targets
        alone = torch.cat([self._call(row(targets, i)) for i in range(count(targets))])
        if not all(
            torch.allclose(self._call(tile(targets, times)), alone.repeat(times), rtol=1e-5, atol=1e-7, equal_nan=True)
            for times in _TIMES
        ):
            raise InvalidArgument(_OF_THE_BATCH)
        self._alone = self._reads_values(row(targets, 0))

    def _reads_values(self, example: Any) -> bool:
        """Whether the function turns targets into Python numbers. It is refused if a weight depends on other targets."""
        module, device = OfRecords(nn.Identity(), lambda pair: self._call(pair[1])), tensors(example)[0].device
        seen = observe(module, row_sums, ((example, example), example), device)
        try:
            check_rows(module, row_sums, ((example, example), example), device, seen=seen, trained=False)
        except ModelRefused:
            raise InvalidArgument(_OF_THE_BATCH) from None
        return seen.reads is not None

    def __call__(self, targets: Any) -> Tensor:
        """(records,)."""
        zeros = torch.zeros(count(targets), dtype=self._dtype)
        found = of_each(self._call, targets, row(self._trial, 0), zeros, alone=self._alone, alive=lambda: None)
        return found.nan_to_num(0, 0, 0).clamp(0, 1)

    def _call(self, targets: Any) -> Tensor:
        found = torch.as_tensor(self._function(targets))
        if found.shape != (count(targets),):
            raise InvalidArgument(
                f"weights must give one number per record: for {count(targets)} targets that are {described(targets)} it gave "
                f"{described(found)}."
            )
        return found.to(self._dtype)


def lost_weights(loss_fn: object, output: Any, targets: Any) -> str | None:
    """The name of weights in a torch loss that only multiply a record's whole loss: a kept sign forgets them. None: there are none.

    Tried on synthetic records: with several labels per record, weights also act within it, and are not lost.
    """
    names = [name for name in ("weight", "pos_weight") if isinstance(getattr(loss_fn, name, None), Tensor)]
    if not isinstance(loss_fn, nn.Module) or not isinstance(output, Tensor) or not isinstance(targets, Tensor):
        return None
    if not names:
        return None
    if targets.is_floating_point():
        targets = targets.round()  # labels, as a rule: 0 or 1
    plain = copy(loss_fn)
    plain._buffers = {**loss_fn._buffers, **dict.fromkeys(names)}
    with torch.inference_mode():
        first, second = (loss_fn(some, targets) / plain(some, targets) for some in (output, 0.5 * output + 0.1))
    same = first.shape[:1] == first.shape and torch.allclose(first, second, rtol=1e-3, equal_nan=True)
    return " and ".join(names) if same else None
