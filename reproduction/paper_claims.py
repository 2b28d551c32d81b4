"""What the paper claims, and what came out here: a row per claim, with the figures behind its verdict.

A verdict follows from the results by a rule that stands beside it, so that a new run can change it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.bench import GHOST, HOOKS
from benchmarks.page import PAPER
from benchmarks.results import read
from reproduction import paper_tables, results_file
from reproduction.certified import SEEDS
from reproduction.pages import table
from reproduction.paper_numbers import MODEL_SIZE, TABLE1
from reproduction.results_file import found

Claim = tuple[str, str, str, str]  # what the paper says, the verdict, the figures, the command
YES, PARTLY, NO, NOT_RUN = "reproduced", "partly", "not reproduced", "not run at this size"
_NOISES = (0.5, 1, 2, 4, 8)
_SLIGHTLY_LESS = 0.9  # of the mean batch size: how N_B "slightly less" is read


def claims() -> str:
    """All claims as a table."""
    rows = [large_batches(), small_batches(), robust(), converges(), model_size(), cifar(), impairment(), cost()]
    return table(["the paper says", "here", "the figures", "command"], [list(row) for row in rows])


# --- table 1 ----------------------------------------------------------------------------------------------------------------
def large_batches() -> Claim:
    pairs = [_pair(500, noise) for noise in _NOISES]
    claimed = [TABLE1[500][noise][1] > TABLE1[500][noise][3] for noise in _NOISES]
    agree = sum(ours > other for (ours, other), expected in zip(pairs, claimed, strict=True) if expected)
    verdict = _verdict(agree, sum(claimed), known=not any(math.isnan(value) for pair in pairs for value in pair))
    figures = f"DP-ULR / DP-SGD at sigma0 {_list(_NOISES)}: {_pairs(pairs)}; the paper: {_pairs(_printed(500))}"
    return "at large batches (500) DP-ULR is ahead of DP-SGD at low noise", verdict, figures, "table1 --settings 500"


def small_batches() -> Claim:
    pairs, printed = [_pair(64, noise) for noise in (0.5, 1)], _printed(64)[:2]
    verdict = _verdict(sum(ours < other for ours, other in pairs), 2)
    figures = f"DP-ULR / DP-SGD at sigma0 0.5, 1: {_pairs(pairs)}; the paper: {_pairs(printed)}"
    return "at small batches (64) it is behind", verdict, figures, "table1 --settings 64"


def robust() -> Claim:
    """At batch 64: both methods lose accuracy from sigma0 = 0.5 to 8, DP-ULR less, and it ends ahead."""
    (first, first_sgd), (last, last_sgd) = _pair(64, 0.5), _pair(64, 8)
    less, ahead = first - last < first_sgd - last_sgd, last > last_sgd + 5
    verdict = _verdict(less + ahead, 2)
    paper = _printed(64)
    figures = (
        f"from sigma0 0.5 to 8 DP-ULR loses {first - last:.1f} points, DP-SGD {first_sgd - last_sgd:.1f}, and they end at "
        f"{last:.1f} and {last_sgd:.1f}; the paper: {paper[0][0] - paper[4][0]:.1f} and {paper[0][1] - paper[4][1]:.1f}, "
        f"{paper[4][0]:.1f} and {paper[4][1]:.1f}"
    )
    return "at batch 64 DP-ULR suffers less from noise, and ends ahead by far", verdict, figures, "table1 --settings 64"


def converges() -> Claim:
    """Seed 0, batch 64, sigma0 = 8: accuracy of the last epoch over that of the best."""
    ulr, sgd = (_curve(method, 64, 8.0) for method in (0, 1))
    if not (ulr and sgd):
        return "under high noise DP-SGD degrades while DP-ULR goes on converging", NOT_RUN, "-", "figure-dynamics"
    drops = [100 * (max(curve) - curve[-1]) for curve in (ulr, sgd)]
    verdict = _verdict((drops[0] < 2) + (drops[1] > 2), 2)
    figures = f"batch 64, sigma0 8, last epoch below the best one: DP-ULR {drops[0]:.1f} points, DP-SGD {drops[1]:.1f}"
    return "under high noise DP-SGD degrades while DP-ULR goes on converging", verdict, figures, "figure-dynamics"


# --- the other experiments --------------------------------------------------------------------------------------------------
def model_size() -> Claim:
    """The lead of DP-ULR over DP-SGD at batch 64, small and large model."""
    what, command = "at small batches the lead over DP-SGD shrinks as the model grows (sigma0 = 8)", "model-size"
    leads = []
    for size in ("small", "large"):
        ours = [found(paper_tables.model_size_runs(64, size, 0)[method : method + 1]) for method in (0, 1)]
        if not all(ours):
            return what, NOT_RUN, "one epoch of each was run, the paper has 25", command
        leads.append(100 * (ours[0][0]["test_accuracy"] - ours[1][0]["best_accuracy"]))
    printed = [MODEL_SIZE[64][size][1] - MODEL_SIZE[64][size][3] for size in ("small", "large")]
    figures = (
        f"lead at batch 64, small and large: {leads[0]:+.1f}, {leads[1]:+.1f}; the paper: {printed[0]:+.1f}, {printed[1]:+.1f}"
    )
    return what, YES if leads[1] < leads[0] else NO, figures, command


def cifar(epochs: int = 10) -> Claim:
    what, command = "CIFAR-10: DP-ULR fluctuates and ends near DP-SGD", "cifar --epochs 10"
    runs = {label: found(paper_tables.cifar_runs(label, 0, epochs)) for label in paper_tables.CIFAR}
    done = {label: 100 * results[0]["test_accuracy"] for label, results in runs.items() if results}
    if "dp-sgd" not in done or len(done) < 3:
        return what, NOT_RUN, "one epoch of each was run", command
    best = max(value for label, value in done.items() if label != "dp-sgd")
    figures = ", ".join(f"{label} {value:.1f}" for label, value in done.items())
    return what, YES if best > done["dp-sgd"] - 3 else NO, f"after {epochs} epochs: {figures}", command


def impairment() -> Claim:
    """The paper's own ratio, where its sentence says that it is small."""
    points: list[dict[str, Any]] = json.loads((results_file.folder() / "figure-bound.json").read_text())
    near = [point for point in points if point["dataset_size"] >= 1_000 and _SLIGHTLY_LESS <= point["share"] < 1]
    small = sum(point["paper_ratio"] < 1e-3 for point in near)
    figures = f"N_B from {_SLIGHTLY_LESS:g} qN to below qN: below 1e-3 at {small} of {len(near)} points of its figure"
    what = "for N >= 1,000 and N_B slightly below qN rejection costs less than 1e-3 of the rest"
    return what, _verdict(small, len(near)), figures, "figure-bound"


def cost() -> Claim:
    case = read()["seconds_a_step"]["mlp, batch 500"]
    ghost, hooks = (case[PAPER] / case[peer] for peer in (GHOST, HOOKS))
    figures = f"K = 16, batch 500: {hooks:.2f} times Opacus' hooks, {ghost:.2f} times its ghost clipping"
    verdict = _verdict((hooks <= 1.28) + (ghost <= 1.28), 2)
    return "1.28 times slower than Opacus, K unstated", verdict, figures, "make bench"


# --- helpers ----------------------------------------------------------------------------------------------------------------
def _pair(batch: int, noise: float) -> tuple[float, float]:
    """Validation accuracy of DP-ULR (last epoch) and DP-SGD (best epoch), as the paper has them: means over seeds, in per cent."""
    by_method = zip(*(paper_tables.table1_runs(batch, noise, seed) for seed in range(SEEDS)), strict=True)
    ulr, sgd = (found(runs) for runs in by_method)
    return _mean([100 * r["test_accuracy"] for r in ulr]), _mean([100 * r["best_accuracy"] for r in sgd])


def _curve(method: int, batch: int, noise: float) -> list[float]:
    results = found(paper_tables.table1_runs(batch, noise, 0)[method : method + 1])
    return [point["test_accuracy"] for point in results[0]["curve"]] if results else []


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else math.nan


def _printed(batch: int) -> list[tuple[float, float]]:
    return [(TABLE1[batch][noise][1], TABLE1[batch][noise][3]) for noise in _NOISES]


def _pairs(pairs: Sequence[tuple[float, float]]) -> str:
    return ", ".join(f"{first:.1f} / {second:.1f}" for first, second in pairs)


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _verdict(agree: int, of: int, *, known: bool = True) -> str:
    if not known:
        return NOT_RUN
    return YES if agree == of else PARTLY if agree else NO
