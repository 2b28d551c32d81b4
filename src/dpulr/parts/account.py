"""The account of a run: its plan, the ledger that every step is charged to, and why nothing is certified, if so."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from dpulr import accounting
from dpulr.accounting.disk_ledger import DiskLedger
from dpulr.accounting.events import Charge, Release, SampledStep, Unaccounted
from dpulr.accounting.statement import Guarantee
from dpulr.distributed.ranks import Alone
from dpulr.errors import BudgetError, StepError
from dpulr.plan import Plan


class Account:
    """What one run has spent. Of several ranks, rank 0 keeps the ledger."""

    def __init__(self, plan: Plan, ranks: Alone) -> None:
        self.plan, self._ranks = plan, ranks
        self.run = ranks.shared(lambda: secrets.token_hex(8))
        self.ledger: accounting.Ledger = _LEDGERS.setdefault(self.run, accounting.Ledger())
        self._on_disk = False
        self.reasons: list[str] = []
        """Why nothing is certified any more."""

    def void(self, reason: str) -> None:
        """From now on nothing is certified, and a warning says why."""
        if reason not in self.reasons:
            self.reasons.append(reason)
            warnings.warn(f"no guarantee any more: {reason}.", stacklevel=2)

    # --- charging ---------------------------------------------------------------------------------------------------------
    def charge_step(self, parameters: Iterable[Tensor]) -> Plan:
        """Charge the next step, before anything is drawn for it. Returns its plan. All ranks must hold the same parameters."""
        step = self.plan.at(self.ledger.steps)

        def charge() -> None:
            self.ledger.append(Unaccounted(self.reasons[0]) if self.reasons else step.event)

        self._ranks.charged(charge, steps=self.ledger.steps, parameters=parameters, reasons=self.reasons, void=self.void)
        return step

    def charge_all_records(self, release: Release) -> None:
        """Charge a release that every record is in."""
        void = [*self.reasons, *self.plan.event.reasons]
        self.ledger.append(Unaccounted(void[0]) if void else SampledStep(release, 1.0))

    # --- what was spent ---------------------------------------------------------------------------------------------------
    def guarantee(self, step: int) -> Guarantee:
        """What the epsilon of this run is worth, all of its ledger and the step to come included."""
        left = max(1, self.plan.steps - self.ledger.steps)
        planned = [*self.ledger.charges, Charge(self.plan.at(step).event, left)]
        return "none" if self.reasons else accounting.guarantee_of(planned, self.plan.target_delta)

    def spent(self, delta: float | None, schema: str) -> accounting.PrivacySpent:
        """What the steps so far have cost."""
        return accounting.privacy_spent(
            self.ledger.charges,
            self.plan.target_delta if delta is None else delta,
            reasons=self.reasons,
            public_size=self.plan.public_size,
            schema=schema,
            evaluation_epsilon=self.ledger.evaluation_epsilon,
        )

    # --- other ledgers ----------------------------------------------------------------------------------------------------
    def use(self, given: accounting.Ledger | Callable[[], accounting.Ledger]) -> None:
        """Charge the steps to this ledger. What it holds counts as spent; the plan shrinks if the target would be exceeded."""
        if self._charged:
            raise StepError(f"this engine has charged {self._charged} that the other ledger does not hold.")
        ledger = self._ranks.kept(given if callable(given) else lambda: given)
        on_disk = self._ranks.shared(lambda: ledger.start.run if isinstance(ledger, DiskLedger) else None)
        self.run, self._on_disk = on_disk or self.run, on_disk is not None
        self._adopt(ledger)

    @property
    def _charged(self) -> str:
        """What this engine has charged, in words; nothing, if it has not."""
        if self.ledger.steps > 0:
            return f"{self.ledger.steps} steps"
        return "a noisy evaluation" if self.ledger.evaluations else ""

    def _adopt(self, ledger: accounting.Ledger) -> None:
        unaccounted = [charge.step.reason for charge in ledger.charges if isinstance(charge.step, Unaccounted)]
        if unaccounted and self.plan.target_epsilon is not None and not isinstance(self.plan.event, Unaccounted):
            raise BudgetError(f"no target_epsilon can be met on top of a ledger without a guarantee: {unaccounted[0]}.")
        self.ledger = _LEDGERS[self.run] = ledger
        if any(charge.step != self.plan.event for charge in ledger.charges):
            self.plan = self.plan.limited(ledger.charges)

    def state(self) -> dict[str, Any]:
        return {"ledger": self.ledger.to_dict(), "run": self.run, "reasons": list(self.reasons)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, or go back to it: what this process has charged to that run since then stays charged."""
        run = state.get("run")
        if run != self.run and self._charged:
            raise StepError(
                f"this engine has charged {self._charged}, which a state of another run does not hold. To take over "
                "other weights use model.load_state_dict(state['model']) and engine.parameters_changed(public=True): the "
                "engine goes on counting."
            )
        known = _LEDGERS.get(run or self.run, self.ledger)
        known.hold_at_least(accounting.Ledger.from_dict(state["ledger"]))
        if self._on_disk:  # what is charged stays there
            self.ledger.hold_at_least(known)
            self._adopt(self.ledger)
        else:
            self.run = run or self.run
            self._adopt(known)
        for reason in state.get("reasons", ()):
            self.void(str(reason))


_LEDGERS: dict[str, accounting.Ledger] = {}
"""The ledger of every run of this process: an engine that loads a state of one goes on with it, so that nothing is forgotten."""
