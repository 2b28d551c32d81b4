"""The ledger of a run: what was charged, in order, and what it costs. It only grows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dpulr import validate
from dpulr.accounting import events, privacy_cost
from dpulr.accounting.events import Charge, Step
from dpulr.errors import InvalidArgument

FORMAT = 1


class Ledger:
    """Charges of a run. Equal steps are merged: the order of steps does not change their joint price."""

    def __init__(self, charges: tuple[Charge, ...] | list[Charge] = ()) -> None:
        self._counts: dict[Step, int] = {}
        self.evaluations: list[float] = []
        """Epsilons of noisy evaluations on held-out records, each a pure one (delta 0): they add to that of the steps."""
        for charge in charges:
            self.append(charge.step, charge.count)

    def append(self, step: Step, count: int = 1) -> None:
        """Charge `count` steps."""
        charge = Charge(step, count)
        if charge.count:
            self._counts[step] = self._counts.get(step, 0) + charge.count

    def charge_evaluation(self, epsilon: float) -> None:
        """Charge a noisy evaluation."""
        validate.positive("epsilon", epsilon)
        self.evaluations.append(float(epsilon))

    def hold_at_least(self, other: Ledger) -> None:
        """Charge what another state of the same run holds beyond this one."""
        for charge in other.charges:
            self.append(charge.step, max(0, charge.count - self._counts.get(charge.step, 0)))
        for epsilon in other.evaluations[len(self.evaluations) :]:
            self.charge_evaluation(epsilon)

    @property
    def evaluation_epsilon(self) -> float:
        return math.fsum(self.evaluations)

    @property
    def charges(self) -> list[Charge]:
        return [Charge(step, count) for step, count in self._counts.items()]

    @property
    def steps(self) -> int:
        return sum(self._counts.values())

    @property
    def certified(self) -> bool:
        return privacy_cost.is_certified(self.charges)

    def epsilon(self, delta: float, method: str = "pld") -> float:
        return privacy_cost.epsilon(self.charges, delta, method) + self.evaluation_epsilon

    def to_dict(self) -> dict[str, Any]:
        more = {"evaluations": list(self.evaluations)} if self.evaluations else {}
        return {"format": FORMAT, "charges": [events.to_dict(charge) for charge in self.charges], **more}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ledger:
        """The ledger written by `to_dict`; anything unknown is an error."""
        if data.get("format") != FORMAT:
            raise InvalidArgument(f"Ledger format {data.get('format')!r} is not {FORMAT}: its cost cannot be stated.")
        charges = [events.from_dict(item) for item in data["charges"]]
        for charge in charges:
            if not isinstance(charge, Charge):
                raise InvalidArgument(f"A ledger holds charges, not {type(charge).__name__}.")
        ledger = cls(charges)
        for epsilon in data.get("evaluations", ()):
            ledger.charge_evaluation(epsilon)
        return ledger

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and (self._counts, self.evaluations) == (other._counts, other.evaluations)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ledger({self.charges!r})"
