"""What a run has cost: events, and the accountants that price them. No torch here; names load when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "calibration": ("calibrate", "calibrate_release", "max_steps"),
    "events": (
        "Charge",
        "GaussianRelease",
        "HiddenDirectionRelease",
        "HiddenSite",
        "NominalRelease",
        "PaperRelease",
        "Release",
        "SampledStep",
        "Unaccounted",
    ),
    "shortcuts": (
        "auto_rejection_threshold",
        "gaussian_epsilon",
        "hidden_direction_epsilon",
        "hidden_direction_release",
    ),
    "ledger": ("Ledger",),
    "dpulr.paper.nominal": ("NominalEpsilon", "paper_nominal", "paper_nominal_epsilon"),
    "privacy_cost": ("delta_at", "epsilon", "privacy_profile"),
    "rejection": ("AUTO_FRACTION",),
    "statement": ("PrivacySpent", "privacy_spent"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

if TYPE_CHECKING:
    from dpulr.accounting.calibration import calibrate, calibrate_release, max_steps
    from dpulr.accounting.events import (
        Charge,
        GaussianRelease,
        HiddenDirectionRelease,
        HiddenSite,
        NominalRelease,
        PaperRelease,
        Release,
        SampledStep,
        Unaccounted,
    )
    from dpulr.accounting.ledger import Ledger
    from dpulr.accounting.privacy_cost import delta_at, epsilon, privacy_profile
    from dpulr.accounting.rejection import AUTO_FRACTION
    from dpulr.accounting.shortcuts import (
        auto_rejection_threshold,
        gaussian_epsilon,
        hidden_direction_epsilon,
        hidden_direction_release,
    )
    from dpulr.accounting.statement import PrivacySpent, privacy_spent
    from dpulr.paper.nominal import NominalEpsilon, paper_nominal, paper_nominal_epsilon

__all__ = [
    "AUTO_FRACTION",
    "Charge",
    "GaussianRelease",
    "HiddenDirectionRelease",
    "HiddenSite",
    "Ledger",
    "NominalEpsilon",
    "NominalRelease",
    "PaperRelease",
    "PrivacySpent",
    "Release",
    "SampledStep",
    "Unaccounted",
    "auto_rejection_threshold",
    "calibrate",
    "calibrate_release",
    "delta_at",
    "epsilon",
    "gaussian_epsilon",
    "hidden_direction_epsilon",
    "hidden_direction_release",
    "max_steps",
    "paper_nominal",
    "paper_nominal_epsilon",
    "privacy_profile",
    "privacy_spent",
]


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module if "." in module else f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
