"""What the options of hidden-direction buy, one by one, on held-out training data.

MNIST, the paper's MLP, epsilon 1, 5 epochs; the last 10,000 training records are the test set, the rest is trained on. Every
variant is run with the learning rates of RATES and seed 0, and its best rate again with the other seeds. Choosing settings this
way is not covered by epsilon.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dpulr.runs.settings import Settings
from reproduction.certified import SEEDS, accuracy, certified_run
from reproduction.pages import table
from reproduction.results_file import described, found
from reproduction.run import Result, Run

RATES = (0.4, 0.8, 1.6)
Variant = dict[str, Any]  # changes to the base; those of the mechanism under "mechanism_options"
_BASE: dict[str, Any] = {
    "model": "mlp",
    "mechanism": "hidden-direction",
    "repeats": 8,
    "batch_size": 2_000,
    "epochs": 5,
    "target_epsilon": 1.0,
    "momentum": 0.9,
    "holdout": 10_000,
}
_OPTIONS: dict[str, Any] = {"antithetic": False, "radius": 0.1}
_EQUAL = [1.0, 1.0, 1.0, 1.0]


def variants() -> dict[str, dict[str, Variant]]:
    """Group: {label: changes}. The last group changes many things at once."""

    def one(**options: Any) -> Variant:
        repeats = {"repeats": options.pop("repeats")} if "repeats" in options else {}
        return {"mechanism_options": options, **repeats}

    plain = {
        **one(subspace=None, layer_weights=_EQUAL, antithetic=True),
        "momentum": 0.0,
        "schedule": "constant",
        "dataset": "reproduction.datasets:mnist_unit",
        "batch_size": 500,
    }
    return {
        "subspace": {"none" if m is None else str(m): one(subspace=m) for m in (4, 16, 32, 64, None)},
        "batch size": {str(size): {"batch_size": size} for size in (500, 2_000, 8_000)},
        "directions, 4 dimensions each": {str(k): one(repeats=k) for k in (1, 4, 8, 16, 64)},
        "two-sided": {
            "no, 8 directions": {},
            "yes, 4 directions (as many passes)": one(repeats=4, subspace=32, antithetic=True),
            "yes, 8 directions (twice the passes)": one(antithetic=True),
        },
        "bit": {"sign": {}, **{f"clip, kappa = {kappa}": one(kappa=kappa) for kappa in ("auto", "adaptive")}},
        "last layer": {"hidden": {}, "exact": one(last_layer="exact")},
        "layer weights": {"auto": {}, "equal": one(layer_weights=_EQUAL)},
        "radius": {f"{radius:g}": one(radius=radius) for radius in (0.01, 0.03, 0.1, 0.3)},
        "momentum": {f"{beta:g}": {"momentum": beta} for beta in (0.0, 0.9)},
        "schedule": {"cosine": {}, "constant": {"schedule": "constant"}},
        "inputs": {
            "(x - 0.1) / 0.3": {},
            "x in [0, 1]": {"dataset": "reproduction.datasets:mnist_unit"},
            "x in [-1, 1]": {"dataset": "reproduction.datasets:mnist_symmetric"},
        },
        "together": {
            "all as above": {},
            "all plain": plain,
            "16 directions, radius 0.03": one(repeats=16, radius=0.03),
            "32 directions, 64 dimensions, radius 0.03": one(repeats=32, subspace=64, radius=0.03),
        },
    }


def runs(variant: Variant, seed: int) -> list[Run]:
    """One run for each learning rate. Momentum changes what a rate means: the sum of a step's effects is kept."""
    options = _OPTIONS | variant.get("mechanism_options", {})
    values = _BASE | {name: value for name, value in variant.items() if name != "mechanism_options"}
    scale = (1 - values["momentum"]) / 0.1
    rates = [round(scale * rate, 3) for rate in RATES]
    return [Run(Settings(**values, learning_rate=rate, seed=seed, mechanism_options=options)) for rate in rates]


def stages(groups: Sequence[str], seeds: int) -> Iterator[list[Run]]:
    """All rates with seed 0; then, once their results are there, the best rate with the other seeds."""
    chosen = [variant for group in groups for variant in variants()[group].values()]
    yield [run for variant in chosen for run in runs(variant, 0)]
    tried = [(variant, best(found(runs(variant, 0)))) for variant in chosen if len(found(runs(variant, 0))) == len(RATES)]
    yield [runs(variant, seed)[rate] for variant, rate in tried for seed in range(1, seeds)]


def best(results: Sequence[Result]) -> int:
    return max(range(len(results)), key=lambda i: results[i]["test_accuracy"])


def markdown(seeds: int = SEEDS) -> str:
    """What has been run, as tables."""
    parts = []
    for group, members in variants().items():
        rows = []
        for label, variant in members.items():
            first = found(runs(variant, 0))
            if len(first) == len(RATES):
                chosen = best(first)
                results = found(runs(variant, seed)[chosen] for seed in range(seeds))
                rate = results[0]["run"]["learning_rate"]
                rows.append([label, accuracy(results), f"{rate:g}", f"{first[chosen]['seconds']:.0f}"])
        parts += [table([group, "accuracy (%)", "learning rate", "seconds"], rows)] if rows else []
    return "\n\n".join(parts) or "Not run yet."


def removed(seeds: int = SEEDS) -> str:
    """What is no longer in the package, from results that stay: the variants at their best rates."""
    every = described("held-out.json", epochs=5)

    def trained(**wanted: Any) -> str:
        results = [r for r in every if all(r["run"].get(n, r["run"]["mechanism_options"].get(n)) == v for n, v in wanted.items())]
        rate = max((r for r in results if r["run"]["seed"] == 0), key=lambda r: r["test_accuracy"])["run"]["learning_rate"]
        return accuracy([r for r in results if r["run"]["learning_rate"] == rate][:seeds])

    base = found([runs({}, seed)[best(found(runs({}, 0)))] for seed in range(seeds)])
    rows = [
        ["as above", accuracy(base)],
        ["8 orthonormal directions (a frame)", trained(frames=8)],
        ["moving average of the weights, 0.95", trained(average=0.95, schedule="cosine")],
        ["moving average of the weights, 0.95, constant rate", trained(average=0.95, schedule="constant")],
        ["4 views, moved by up to 2 pixels", trained(views=4)],
        *([f"differences of losses clipped at {kappa:g}, the same for all layers", trained(kappa=kappa)] for kappa in (0.001, 0.1)),
    ]
    return table(["removed", "accuracy (%)"], rows)


def longer_runs(seed: int) -> dict[str, Run]:
    """Over 25 epochs at epsilon 0.80, with the settings of the table: what is left of the options that gained over 5."""
    base = {"epochs": 25, "holdout": 10_000}
    options = certified_run("mnist", "hidden-direction", 0.8016, seed).settings.mechanism_options
    return {
        "as in the table": certified_run("mnist", "hidden-direction", 0.8016, seed, **base),
        "exact last layer": certified_run(
            "mnist", "hidden-direction", 0.8016, seed, **base, mechanism_options={**options, "last_layer": "exact"}
        ),
        "constant rate, half of it": certified_run(
            "mnist", "hidden-direction", 0.8016, seed, **base, schedule="constant", learning_rate=0.1
        ),
    }


def longer(seeds: int = 2) -> str:
    rows = [[label, accuracy(found(longer_runs(seed)[label] for seed in range(seeds)))] for label in longer_runs(0)]
    return table(["25 epochs, epsilon 0.80", "accuracy (%)"], rows)
