"""What a private step costs beside what a user would pick instead.

    python -m benchmarks.bench            # everything, into reproduction/results/bench.json; then python -m reproduction pages
    python -m benchmarks.bench --quick    # the ratio table alone; fails when a goal is missed by more than 25 %

All peers of a case take turns within one process, warmed up, with the same threads; times are medians over rounds; what counts
is the ratio. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import dpulr
from benchmarks import results
from benchmarks.peers import Step, cifar_like, exponent, mnist_like, ours, peers, plain
from benchmarks.start import MODELS
from reproduction import ROOT
from reproduction.pages import table

SLACK = 1.25
GHOST, HOOKS, PLAIN = "Opacus, ghost", "Opacus, hooks", "plain SGD"
ONE, FOUR, GRADIENT = "hidden-direction, K = 1", "hidden-direction, K = 4", "gradient"


@dataclass(frozen=True)
class Goal:
    """`peer` may take at most `factor` times as long as `other`."""

    case: str
    peer: str
    factor: float
    other: str


def goals() -> list[Goal]:
    wanted = []
    for batch in (64, 200, 500, 2_000):
        case = f"mlp, batch {batch}"
        wanted += [Goal(case, ONE, 0.5, GHOST), Goal(case, ONE, 0.15 if batch == 64 else 0.05, HOOKS), Goal(case, FOUR, 1.3, GHOST)]
        wanted += [Goal(case, ONE, 1.3, PLAIN), Goal(case, GRADIENT, 0.55, GHOST)]
    return [
        *wanted,
        Goal("resnet5, batch 500", ONE, 1.0, GHOST),
        Goal("resnet5, batch 500", GRADIENT, 0.55, GHOST),
        Goal("mlp, batch 500", "gaussian, 16 pairs", 0.4, HOOKS),
        Goal("mlp, batch 500", "paper, K = 16", 2.0, "passes of paper, K = 16"),
        Goal("mlp, batch 500", "paper, K = 16", 0.1, "naive DP-ULR, K = 16"),
    ]


def cases() -> dict[str, tuple[Any, Any, int, list[str]]]:
    """Name: (model, data, batch, peers)."""
    both_ways, many = "hidden-direction, K = 1, both ways", "hidden-direction, K = 16"
    few = [PLAIN, GHOST, HOOKS, GRADIENT, ONE, both_ways, FOUR, many, "floor of hidden-direction, K = 1"]
    table: dict[str, tuple[Any, Any, int, list[str]]] = {
        f"mlp, batch {batch}": (dpulr.models.mlp, mnist_like, batch, few) for batch in (64, 200, 2_000)
    }
    table["mlp, batch 500"] = (dpulr.models.mlp, mnist_like, 500, list(peers()))
    table["resnet5, batch 500"] = (dpulr.models.resnet5, cifar_like, 500, [PLAIN, GHOST, HOOKS, GRADIENT, ONE, both_ways, FOUR])
    return table


def measure(steps: dict[str, Step], rounds: int, least: float) -> dict[str, float]:
    """Median seconds per step; the peers take turns, each for at least `least` seconds per round."""
    counts = {}
    for name, step in steps.items():
        step()
        step()
        started = time.perf_counter()
        step()
        counts[name] = max(1, round(least / (time.perf_counter() - started)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            for _ in range(counts[name]):
                step()
            times[name].append((time.perf_counter() - started) / counts[name])
    return {name: statistics.median(values) for name, values in times.items()}


def run_case(name: str, rounds: int, least: float, only: Sequence[str] | None = None) -> dict[str, float]:
    model, data, batch, chosen = cases()[name]
    torch.manual_seed(0)
    records = data()
    known = peers()
    steps = {peer: known[peer](model(seed=0), records, batch) for peer in chosen if only is None or peer in only}
    return measure(steps, rounds, least)


def report_goals(times: dict[str, dict[str, float]]) -> tuple[str, int]:
    """The ratio table, and how many goals are missed by more than the slack."""
    rows, failed = [], 0
    for goal in goals():
        row = times.get(goal.case, {})
        if goal.peer not in row or goal.other not in row:
            continue
        ratio = row[goal.peer] / row[goal.other]
        verdict = "met" if ratio <= goal.factor else "within 25 %" if ratio <= SLACK * goal.factor else "missed"
        failed += verdict == "missed"
        rows.append([goal.case, goal.peer, goal.other, f"{goal.factor:g}", f"{ratio:.3g}", verdict])
    return table(["case", "peer", "beside", "goal", "measured", ""], rows), failed


# --- memory, growth, start ------------------------------------------------------------------------------------------------
def memory() -> list[dict[str, Any]]:
    """Peak memory of a process that has taken five steps, above one that has taken none."""
    rows = []
    for kind, batch in (("mlp", 500), ("mlp", 2_000), ("wide", 100), ("wide", 1_000)):
        row: dict[str, Any] = {"model": kind, "batch": batch}
        for which in ("plain", "hidden"):
            peak, before = map(int, _other_process("benchmarks.memory", which, kind, str(batch)).split())
            row[which], row[f"{which}_step"] = peak, peak - before
        rows.append(row)
    return rows


def deep(layers: int, width: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(layers - 1):
        parts += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*parts, nn.Linear(width, 10))


def growth(rounds: int, least: float) -> dict[str, dict[str, Any]]:
    """Seconds per step of hidden-direction against depth, width, batch and repeats, beside plain SGD."""

    def pair(
        layers: int = 4, width: int = 64, batch: int = 500, repeats: int = 1, groups: int | None = None
    ) -> tuple[float, float]:
        data = torch.utils.data.TensorDataset(torch.randn(20_000, width), torch.randint(0, 10, (20_000,)))
        steps = {
            "hidden": ours(dpulr.HiddenDirection(repeats=repeats, groups=groups, antithetic=True))(
                deep(layers, width), data, batch
            ),
            "plain": plain(deep(layers, width), data, batch),
        }
        times = measure(steps, rounds, least)
        return times["hidden"], times["plain"]

    curves: dict[str, dict[str, Any]] = {}
    for name, values, fixed in (
        ("layers", [2, 4, 8, 16, 32, 64], {}),
        ("layers, in 2 groups", [2, 4, 8, 16, 32, 64], {"groups": 2}),
        ("width", [32, 64, 128, 256, 512], {}),
        ("batch", [64, 128, 256, 512, 1_024, 2_048], {}),
        ("repeats", [1, 2, 4, 8, 16, 32], {}),
    ):
        pairs = [pair(**{name.split(",")[0]: value}, **fixed) for value in values]
        hidden, plain_sgd = [p[0] for p in pairs], [p[1] for p in pairs]
        upper = len(values) // 2
        curves[name] = {
            "values": values,
            "hidden": hidden,
            "plain": plain_sgd,
            "exponent": exponent(values[upper:], hidden[upper:]),
        }
    return curves


def start_up() -> dict[str, Any]:
    """Seconds from `import torch` done to the first step done, in a new process; and the share of a step that sampling takes."""
    from dpulr.sampling import PoissonSampling

    first = {}
    for name in MODELS:
        runs = [[float(value) for value in _other_process("benchmarks.start", name).split()] for _ in range(3)]
        first[name] = dict(zip(("seconds", "optimizer"), map(statistics.median, zip(*runs, strict=True)), strict=True))
    sampler, rng = PoissonSampling(500 / 60_000, 0), np.random.default_rng()
    step = ours(dpulr.HiddenDirection(repeats=1))(dpulr.models.mlp(seed=0), mnist_like(), 500)
    times = measure({"sampling": lambda: (sampler.draw(60_000, rng), None)[1], "step": step}, 5, 0.2)
    return {"first_step": first, "sampling_share": times["sampling"] / times["step"]}


def _other_process(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


# --- the command ----------------------------------------------------------------------------------------------------------
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="the ratio table alone; fails when a goal is missed by more than 25 %%"
    )
    parser.add_argument("--cases", nargs="+", choices=list(cases()), help="measure these alone, into the results that are there")
    parser.add_argument("--memory", action="store_true", help="measure memory alone, into the results that are there")
    parser.add_argument("--start", action="store_true", help="measure first steps alone, into the results that are there")
    options = parser.parse_args()
    if options.memory:
        results.update(memory=memory())
        return
    if options.start:
        results.update(start=start_up())
        return
    rounds, least = (3, 0.15) if options.quick else (7, 0.3)
    times = {}
    for name in options.cases or cases():
        wanted = [peer for goal in goals() if goal.case == name for peer in (goal.peer, goal.other)] if options.quick else None
        times[name] = run_case(name, rounds, least, wanted)
        print(name, {peer: f"{1e3 * value:.2f} ms" for peer, value in times[name].items()}, flush=True)
    text, failed = report_goals(times)
    print(text)
    if options.quick:
        sys.exit(f"{failed} goals missed" if failed else 0)
    if options.cases:
        results.update(seconds_a_step=results.read()["seconds_a_step"] | times)
        return
    about = {"threads": torch.get_num_threads(), "machine": platform.machine(), "python": platform.python_version()}
    versions = {"torch": torch.__version__, "version": dpulr.__version__}
    measured = {"memory": memory(), "growth": growth(3, 0.2), "start": start_up()}
    results.update(**about, **versions, seconds_a_step=times, **measured)


if __name__ == "__main__":
    main()
