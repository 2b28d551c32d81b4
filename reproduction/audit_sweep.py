"""The full audit (`python -m reproduction audit`): all mechanisms in many settings, into results/audit.json. Half an hour.

It is resumable: what the file holds is not measured again. All settings of a group are judged together at a confidence of 95 %.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dpulr.accounting.rounding import down, up
from dpulr.audit import canaries, whole_run
from dpulr.audit.one_step import one_step, play
from dpulr.audit.picture import draw
from dpulr.audit.verdict import Verdict
from dpulr.mechanisms import Gaussian, Gradient, HiddenDirection, ZerothOrder
from reproduction import results_file
from reproduction.opacus_game import OpacusGame
from reproduction.pages import table
from reproduction.paper_audit import PAPER_SETTINGS
from reproduction.planted_bugs import BUGS

CONFIDENCE, DELTA = 0.95, 1e-5
ROWS = 200_000
GROUPS = ("tight", "bugs", "certified", "paper")
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """`run` takes delta, confidence, seed and the options."""

    group: str
    name: str
    run: Callable[..., Verdict]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        canary = f" ({self.options['canary']})" if "canary" in self.options else ""
        return f"{self.group}: {self.name}{canary}"

    @property
    def seed(self) -> int:
        """Its own, so that a setting gives the same verdict whatever stands around it."""
        return zlib.crc32(self.key.encode())

    def audit(self, confidence: float) -> Verdict:
        return self.run(**{"delta": DELTA, **self.options}, confidence=confidence, seed=self.seed)


def _opacus(*, trials: int, delta: float, confidence: float, **options: Any) -> Verdict:
    game = OpacusGame(dim=1, **options)
    return play(game, canary="crafted", trials=trials, delta=delta, confidence=confidence, settings={"dim": 1, **options})


def certified() -> Iterator[Setting]:
    """Settings on which the bound must not exceed the claim."""

    def step(name: str, mechanism: Any, **options: Any) -> Setting:
        return Setting("certified", name, one_step, {"mechanism": mechanism, **options})

    for noise in (0.5, 1.0, 2.0, 4.0):
        for rate, steps in ((1.0, 1), (0.1, 1), (0.1, 5), (0.5, 2)):
            options = {"noise_multiplier": noise, "sample_rate": rate, "steps": steps, "trials": ROWS}
            yield step(f"gaussian, noise {noise:g}, q {rate:g}, T {steps}", "gaussian", **options)
    for estimator in ("likelihood-ratio", "baseline", "antithetic"):
        mechanism = Gaussian(estimator=estimator, repeats=4)
        yield step(f"gaussian, {estimator}, 8 dimensions", mechanism, dim=8, trials=50_000)
    yield from _hidden(step)
    for noise, rate in ((1.0, 1.0), (2.0, 1.0), (1.0, 0.1), (2.0, 0.1)):
        options = {"noise_multiplier": noise, "sample_rate": rate, "trials": ROWS}
        yield Setting("certified", f"Opacus, noise {noise:g}, q {rate:g}", _opacus, options)
    for kind in ("ordinary", "mislabelled", "large", "feature"):
        for mechanism_name in ("gaussian", "hidden-direction"):
            yield step(f"{mechanism_name}, among 64 digits", mechanism_name, canary=kind, trials=3_000)
    rejecting = {"canary": "large", "sample_rate": 0.5, "rejection_threshold": 24, "trials": 3_000, "delta": 0.05}
    yield step("gaussian, batches below 24 redrawn", "gaussian", **rejecting)
    yield step("hidden-direction, batches below 24 redrawn", "hidden-direction", **rejecting)
    model = {"model": canaries.perceptron(), "loss_fn": torch.nn.CrossEntropyLoss(reduction="none"), "records": canaries.digits()}
    exact = HiddenDirection(last_layer="exact")
    yield step("hidden-direction, two layers, last one exact", exact, canary="mislabelled", trials=2_000, **model)
    hybrid = HiddenDirection(exact=("2",))
    yield step("hybrid: last layer by a backward pass", hybrid, canary="mislabelled", trials=2_000, **model)
    yield from _gradient(step, model)
    yield step("zeroth-order", "zeroth-order", trials=10_000)
    yield step("zeroth-order, q 0.5, T 2", "zeroth-order", sample_rate=0.5, steps=2, trials=4_000)
    yield step("zeroth-order, among 64 digits", ZerothOrder(repeats=2), canary="large", trials=3_000)
    yield from _whole_runs()


def _gradient(step: Callable[..., Setting], model: dict[str, Any]) -> Iterator[Setting]:
    for noise, rate, steps in ((0.5, 1.0, 1), (1.0, 1.0, 1), (1.0, 0.1, 5), (2.0, 0.5, 2)):
        options = {"noise_multiplier": noise, "sample_rate": rate, "steps": steps, "trials": ROWS}
        yield step(f"gradient, noise {noise:g}, q {rate:g}, T {steps}", "gradient", **options)
    for clipping in ("per-layer", "normalised"):
        mechanism = Gradient(clipping=clipping)
        yield step(f"gradient, two layers, {clipping}", mechanism, canary="mislabelled", trials=2_000, **model)


def _hidden(step: Callable[..., Setting]) -> Iterator[Setting]:
    for dim in (1, 2, 10, 128):
        for noise in (0.5, 1.0, 2.0):
            trials = 1_000_000 if noise == 1 else ROWS
            name = f"hidden-direction, {dim} dimensions, noise {noise:g}"
            yield step(name, "hidden-direction", dim=dim, noise_multiplier=noise, trials=trials)
    for dim in (10, 128):
        for steps in (1, 5):
            name = f"hidden-direction, {dim} dimensions, noise 0.5, q 0.1, T {steps}"
            yield step(name, "hidden-direction", dim=dim, noise_multiplier=0.5, sample_rate=0.1, steps=steps, trials=ROWS // steps)
    variants = {
        "4 repeats": HiddenDirection(subspace=None, repeats=4),
        "clipped differences": HiddenDirection(subspace=None, kappa=1e3),
    }
    for name, variant in variants.items():
        yield step(f"hidden-direction, 10 dimensions, {name}", variant, dim=10, trials=100_000, noise_multiplier=0.5)


def _whole_runs() -> Iterator[Setting]:
    for name, dim in (("gaussian", 1), ("hidden-direction", 10)):
        crafted: dict[str, Any] = {"mechanism": name, "noise_multiplier": 0.5, "dim": dim, "canaries": 20_000, "delta": 1e-6}
        digits = {"mechanism": name, "canary": "mislabelled", "canaries": 1_000}
        yield Setting("certified", f"{name}, one run of 20 steps", whole_run.one_run, crafted)
        yield Setting("certified", f"{name}, one run on digits", whole_run.one_run, digits)
        yield Setting("certified", f"{name}, 1,000 runs of 5 steps", whole_run.many_runs, {"mechanism": name, "runs": 500})


def tight() -> Iterator[Setting]:
    """The worst-case canary, one step: the bound must come close. At delta 0.01 no shape of the curve is assumed."""
    cases: list[tuple[str, str, int, float, int]] = [
        ("gaussian", "gaussian", 1, 1.0, 1_000_000),
        ("hidden-direction, 10 dimensions", "hidden-direction", 10, 1.0, 2_000_000),
        ("hidden-direction, 128 dimensions", "hidden-direction", 128, 0.5, 1_000_000),
        ("hidden-direction, 128 dimensions, noise 1", "hidden-direction", 128, 1.0, 3_000_000),
    ]
    for name, mechanism, dim, noise, trials in cases:
        for delta in (1e-5, 1e-2):
            options = {"mechanism": mechanism, "dim": dim, "noise_multiplier": noise, "trials": trials, "delta": delta}
            yield Setting("tight", f"{name}, delta {delta:g}", one_step, options)


def settings() -> list[Setting]:
    bugs = [Setting("bugs", bug.name, bug.audit, {}) for bug in BUGS.values()]
    paper = [Setting("paper", f"{setting.name}, {setting.canary}", setting.audit, {}) for setting in PAPER_SETTINGS]
    return [*tight(), *bugs, *certified(), *paper]


def confidence_of(setting: Setting, every: list[Setting]) -> float:
    """What each setting of a group needs for all of them to hold together at CONFIDENCE."""
    return 1 - (1 - CONFIDENCE) / sum(other.group == setting.group for other in every)


# --- measuring ------------------------------------------------------------------------------------------------------------
def results() -> Path:
    return results_file.folder() / "audit.json"


def known() -> dict[str, Row]:
    return json.loads(results().read_text()) if results().exists() else {}


def run(say: Callable[[str], None] = print) -> None:
    """Measure what the file lacks. A row that was judged at a higher confidence than needed will do."""
    torch.set_num_threads(1)
    every = settings()
    rows = {setting.key: row for setting in every if (row := known().get(setting.key)) is not None}
    for number, setting in enumerate(every):
        confidence, row = confidence_of(setting, every), rows.get(setting.key)
        if row and row["confidence"] >= confidence - 1e-12 and row["delta"] == setting.options.get("delta", DELTA):
            continue
        verdict = setting.audit(confidence)
        row = verdict.to_dict() | {"group": setting.group, "name": setting.name}
        rows[setting.key] = row | {curve: _short(row[curve]) for curve in ("roc", "allowed")}
        draft = results().with_suffix(".part")
        draft.write_text(json.dumps(rows) + "\n")
        draft.replace(results())
        say(f"{number + 1:3}/{len(every)}  {setting.key}: {verdict}")


def _short(points: list[tuple[float, float]]) -> list[list[float]]:
    """Four figures are enough for a picture."""
    return [[float(f"{a:.4g}"), float(f"{b:.4g}")] for a, b in points]


# --- docs/audit.md --------------------------------------------------------------------------------------------------------
def parts() -> dict[str, str]:
    """The tables of the page, by the names of their places."""
    rows = known()
    order = [setting.key for setting in settings() if setting.key in rows]
    return {group: _table(group, [rows[key] for key in order if rows[key]["group"] == group]) for group in GROUPS}


def _table(group: str, rows: list[Row]) -> str:
    shares = group in ("certified", "tight")
    lines = []
    for row in rows:
        name = BUGS[row["name"]].what if group == "bugs" else row["name"].removesuffix(f", {row['canary']}")
        if shares:
            curve = "-" if row["game"] == "one run" else down(row["curve_bound"])
            bounds = [f"{row['delta']:g}", up(row["claimed_epsilon"], 3), down(row["lower_bound"]), curve]
            cells = [name, row["canary"], *bounds, f"{row['measured'] / row['claimed_epsilon']:.0%}"]
        else:
            factor = row["noise_factor"]
            noise = "-" if factor is None else f"{up(factor, 3)} of the claimed"
            cells = [name, "-" if group == "bugs" else row["canary"], row["verdict"], noise]
        lines.append([*cells, f"{row['trials']:,}", row["attack"]])
    ends = ["trials", "best attack"]
    heads = ["setting", "canary", "delta", "claimed", "any truth", "its curve", "share"]
    if not shares:
        heads = ["setting", "canary", "verdict", "looks like noise of at most"]
    held = sum(not row["broken"] for row in rows)
    summary = f"{len(rows)} settings, {held} hold, {len(rows) - held} broken"
    worst = max((row["measured"] / row["claimed_epsilon"] for row in rows), default=0.0)
    return f"{table([*heads, *ends], lines)}\n\n{summary}{f'; the largest share is {worst:.1%}' if shares else ''}."


def pictures(images: Path) -> None:
    found = known()
    chosen = {
        "audit-gaussian": "tight: gaussian, delta 1e-05",
        "audit-hidden-direction": "tight: hidden-direction, 128 dimensions, delta 1e-05",
        "audit-paper": "paper: extra-noise, K = 4, sigma 0.5, feature",
        "audit-noise-halved": "bugs: noise-halved",
    }
    for name, key in chosen.items():
        row = {field: value for field, value in found[key].items() if field in Verdict.__dataclass_fields__}
        draw(replace(Verdict(**row), proof=tuple(row["proof"]) if row["proof"] else None), images / f"{name}.png")
    draw_sweep([row for row in found.values() if row["group"] == "certified"], images / "audit-sweep.png")


def draw_sweep(rows: list[Row], path: Path) -> None:
    """Measured against claimed, for all certified settings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    low, high = 0.02, 40.0
    axes.fill_between([low, high], [low, high], high, color="#b3261e", alpha=0.13, lw=0, label="above the claim")
    axes.plot([low, high], [0.8 * low, 0.8 * high], color="#8a93a3", lw=0.8, ls="--", label="80 % of the claim")
    for kind, colour, marker in (("one step", "#2563c9", "o"), ("one run", "#c2410c", "s"), ("many runs", "#15803d", "^")):
        points = [(row["claimed_epsilon"], max(row["measured"], low)) for row in rows if row["game"] == kind]
        axes.scatter([x for x, _ in points], [y for _, y in points], s=22, color=colour, marker=marker, label=kind, zorder=3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("claimed epsilon")
    axes.set_ylabel(f"measured lower bound (nothing found: {low:g})")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
