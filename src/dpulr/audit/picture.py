"""The picture of a verdict: the attack's rates, and the region that the claim forbids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dpulr.accounting.rounding import up
from dpulr.audit.verdict import Verdict

_FORBIDDEN, _ATTACK, _CLAIM = "#b3261e", "#2563c9", "#1c2330"


def draw(verdict: Verdict, path: Path) -> Path:
    """Write the picture as PNG or SVG, by the name's ending."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    for axes, log in zip(panels, (False, True), strict=True):
        _panel(axes, verdict, log)
    panels[0].legend(loc="lower right", fontsize=8, framealpha=0.9)
    figure.suptitle(f"{verdict.mechanism}, canary: {verdict.canary}: {verdict}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _panel(axes: Any, verdict: Verdict, log: bool) -> None:
    least = max(20 / verdict.trials, 1e-6) if log else 0.0
    allowed, roc = np.array(verdict.allowed), np.array(verdict.roc)
    fpr = np.geomspace(least, 1, 300) if log else np.linspace(0, 1, 500)
    power = np.interp(fpr, allowed[:, 0], allowed[:, 1])
    pure = np.minimum(np.exp(min(verdict.claimed_epsilon, 600.0)) * fpr + verdict.delta, 1)
    pure = np.minimum(pure, 1 - (1 - fpr - verdict.delta) * np.exp(-verdict.claimed_epsilon))
    axes.fill_between(fpr, power, 1, color=_FORBIDDEN, alpha=0.13, lw=0, label="forbidden by the claim")
    axes.plot(fpr, power, color=_FORBIDDEN, lw=1.2)
    point = f"epsilon {up(verdict.claimed_epsilon, 3)}, delta {verdict.delta:g} alone"
    axes.plot(fpr, pure, color=_CLAIM, lw=1, ls="--", label=point)
    axes.plot(fpr, fpr, color="#8a93a3", lw=0.8, label="guessing")
    shown = roc[(roc[:, 0] >= least) & (roc[:, 1] > 0)] if log else roc
    axes.plot(shown[:, 0], shown[:, 1], color=_ATTACK, lw=1.8, label=verdict.attack)
    axes.set_xlabel("false positives: alarm without the canary")
    axes.set_ylabel("true positives: alarm with the canary")
    if log:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(least, 1)
        axes.set_ylim(least, 1.05)
    else:
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.01)
