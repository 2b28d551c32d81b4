"""The full audit (`make audit`): all mechanisms in many settings, into results/audit.json, and docs/audit.md's tables from it.

It is resumable: what the file holds is not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpulr.audit import canaries
from dpulr.audit import whole_run as training
from dpulr.audit.one_step import one_step
from dpulr.audit.picture import draw
from dpulr.audit.verdict import Verdict, down, up
from dpulr.mechanisms import Gaussian, HiddenDirection, ZerothOrder
from dpulr.runs.files import replace_file
from reproduction import planted_bugs as broken
from reproduction.paper_audit import PAPER_SETTINGS

CONFIDENCE = 0.95
RESULTS = Path("results/audit.json")
PAGE = Path("docs/audit.md")
IMAGES = Path("docs/images")
ROWS = 200_000
Run = Callable[..., Verdict]


@dataclass(frozen=True)
class Setting:
    """`run` takes delta, confidence and seed."""

    group: str
    name: str
    run: Run
    options: dict[str, Any]

    @property
    def key(self) -> str:
        canary = f" ({self.options['canary']})" if "canary" in self.options else ""
        return f"{self.group}: {self.name}{canary}"


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
    for dim in (1, 2, 10, 128):
        for noise in (0.5, 1.0, 2.0):
            trials = 1_000_000 if noise == 1 else ROWS
            yield step(
                f"hidden-direction, {dim} dimensions, noise {noise:g}",
                "hidden-direction",
                dim=dim,
                noise_multiplier=noise,
                trials=trials,
            )
    for dim in (10, 128):
        for steps in (1, 5):
            name = f"hidden-direction, {dim} dimensions, noise 0.5, q 0.1, T {steps}"
            yield step(name, "hidden-direction", dim=dim, noise_multiplier=0.5, sample_rate=0.1, steps=steps, trials=ROWS // steps)
    variants = {
        "4 repeats": HiddenDirection(subspace=None, repeats=4),
        "frames of 4": HiddenDirection(subspace=None, repeats=4, frames=4),
        "8 repeats in frames of 4": HiddenDirection(subspace=None, repeats=8, frames=4),
        "clipped differences": HiddenDirection(subspace=None, kappa=1e3),
    }
    for name, variant in variants.items():
        yield step(f"hidden-direction, 10 dimensions, {name}", variant, dim=10, trials=100_000, noise_multiplier=0.5)
    for noise, rate in ((1.0, 1.0), (2.0, 1.0), (1.0, 0.1), (2.0, 0.1)):
        yield step(f"Opacus, noise {noise:g}, q {rate:g}", "opacus", noise_multiplier=noise, sample_rate=rate, trials=ROWS)
    for kind in ("ordinary", "mislabelled", "large", "feature"):
        for mechanism_name in ("gaussian", "hidden-direction"):
            yield step(f"{mechanism_name}, among 64 digits", mechanism_name, canary=kind, trials=3_000)
    digits = canaries.digits()
    rejecting = {"canary": "large", "sample_rate": 0.5, "rejection_threshold": 24, "trials": 3_000, "delta": 0.05}
    yield step("gaussian, batches below 24 redrawn", "gaussian", **rejecting)
    yield step("hidden-direction, batches below 24 redrawn", "hidden-direction", **rejecting)
    exact = HiddenDirection(last_layer="exact")
    model = {"model": canaries.perceptron(), "loss_fn": torch.nn.CrossEntropyLoss(reduction="none"), "records": digits}
    yield step("hidden-direction, two layers, last one exact", exact, canary="mislabelled", trials=2_000, **model)
    yield step("zeroth-order", "zeroth-order", trials=10_000)
    yield step("zeroth-order, q 0.5, T 2", "zeroth-order", sample_rate=0.5, steps=2, trials=4_000)
    yield step("zeroth-order, among 64 digits", ZerothOrder(repeats=2), canary="large", trials=3_000)
    for name in ("gaussian", "hidden-direction"):
        crafted: dict[str, Any] = {
            "mechanism": name,
            "noise_multiplier": 0.5,
            "dim": 1 if name == "gaussian" else 10,
            "canaries": 20_000,
        }
        yield Setting("certified", f"{name}, one run of 20 steps", training.one_run, {**crafted, "delta": 1e-6})
        yield Setting(
            "certified",
            f"{name}, one run on digits",
            training.one_run,
            {"mechanism": name, "canary": "mislabelled", "canaries": 1_000},
        )
        yield Setting("certified", f"{name}, 1,000 runs of 5 steps", training.many_runs, {"mechanism": name, "runs": 500})


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


def paper() -> Iterator[Setting]:
    for setting in PAPER_SETTINGS:
        yield Setting("paper", f"{setting.name}, {setting.canary}", setting.audit, {})


def bugs() -> Iterator[Setting]:
    for bug in broken.BUGS.values():
        yield Setting("bugs", bug.name, bug.audit, {})


def settings() -> list[Setting]:
    return [*tight(), *bugs(), *certified(), *paper()]


def run(results: Path = RESULTS, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure what is missing in the file, and return all of it."""
    found: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    every = settings()
    found = {key: row for key, row in found.items() if key in {setting.key for setting in every}}
    counts = {group: sum(s.group == group for s in every) for group in ("tight", "bugs", "certified", "paper")}
    for number, setting in enumerate(every):
        confidence = 1 - (1 - CONFIDENCE) / counts[setting.group]
        key, delta = setting.key, setting.options.get("delta", 1e-5)
        if key in found and (found[key]["confidence"], found[key]["delta"]) == (confidence, delta):
            continue
        verdict = setting.run(**{"delta": 1e-5, **setting.options}, confidence=confidence, seed=1_000 + number)
        row = verdict.to_dict()
        row["group"], row["name"] = setting.group, setting.name
        row["roc"], row["allowed"] = _short(row["roc"]), _short(row["allowed"])
        found[key] = row
        results.parent.mkdir(parents=True, exist_ok=True)
        replace_file(results, (json.dumps(found) + "\n").encode())
        say(f"{number + 1:3}/{len(every)}  {key}: {verdict}")
    return found


def _short(points: list[tuple[float, float]]) -> list[list[float]]:
    """Four figures are enough for a picture."""
    return [[float(f"{a:.4g}"), float(f"{b:.4g}")] for a, b in points]


# --- docs/audit.md ----------------------------------------------------------------------------------------------------
def write_page(results: Path = RESULTS, page: Path = PAGE, images: Path = IMAGES) -> None:
    """Fill the tables of the page, between their marks, and draw the pictures."""
    found = json.loads(results.read_text())
    text = page.read_text()
    for group in ("tight", "certified", "paper", "bugs"):
        rows = [row for row in found.values() if row["group"] == group]
        before, rest = text.split(f"<!-- {group} -->\n")
        text = f"{before}<!-- {group} -->\n{_table(group, rows)}<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    page.write_text(text)
    pictures = {
        "audit-gaussian": "tight: gaussian, delta 1e-05",
        "audit-hidden-direction": "tight: hidden-direction, 128 dimensions, delta 1e-05",
        "audit-paper": "paper: extra-noise, K = 4, sigma 0.5, feature",
        "audit-noise-halved": "bugs: noise-halved",
    }
    fields = set(Verdict.__dataclass_fields__)
    for name, key in pictures.items():
        row = {field: value for field, value in found[key].items() if field in fields}
        row["proof"] = tuple(row["proof"]) if row["proof"] else None
        draw(Verdict(**row), images / f"{name}.png")
    draw_sweep([row for row in found.values() if row["group"] == "certified"], images / "audit-sweep.png")


def draw_sweep(rows: list[dict[str, Any]], path: Path) -> None:
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


def _table(group: str, rows: list[dict[str, Any]]) -> str:
    shares = group in ("certified", "tight")
    head = ["setting", "canary", "delta", "claimed", "any truth", "its curve", "share", "trials", "best attack"]
    if not shares:
        head = ["setting", "canary", "verdict", "looks like noise of at most", "trials", "best attack"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        name = broken.BUGS[row["name"]].what if group == "bugs" else row["name"].removesuffix(f", {row['canary']}")
        if shares:
            curve = "-" if row["game"] == "one run" else down(row["curve_bound"])
            cells = [
                name,
                row["canary"],
                f"{row['delta']:g}",
                up(row["claimed_epsilon"]),
                down(row["lower_bound"]),
                curve,
                f"{row['measured'] / row['claimed_epsilon']:.0%}",
            ]
        else:
            noise = f"{up(row['noise_factor'])} of the claimed"
            cells = [name, "-" if group == "bugs" else row["canary"], row["verdict"], noise]
        cells += [f"{row['trials']:,}", row["attack"]]
        lines.append(f"| {' | '.join(cells)} |")
    worst = max(row["measured"] / row["claimed_epsilon"] for row in rows)
    held = sum(not row["broken"] for row in rows)
    summary = f"{len(rows)} settings, {held} hold, {len(rows) - held} broken"
    end = f"{summary}; the largest share is {worst:.1%}." if shares else f"{summary}."
    return "\n".join([*lines, "", end, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="The full audit.")
    parser.add_argument("--page", action="store_true", help="only write docs/audit.md and its pictures from the results")
    if not parser.parse_args().page:
        torch.set_num_threads(1)
        run(say=lambda line: print(line, flush=True))
    write_page()


if __name__ == "__main__":
    main()
