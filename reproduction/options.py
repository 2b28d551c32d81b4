"""What the options of hidden-direction buy, one by one, on held-out training data.

    python -m reproduction.options --groups subspace repeats

MNIST, the paper's MLP, epsilon 1, 5 epochs; the last 10,000 training records are the test set, the rest is trained on. Every
variant is run with the learning rates of RATES and seed 0, and its best rate again with the other seeds. Results resume from the
file. Choosing settings this way is not covered by epsilon.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpulr.mechanisms import HiddenDirection
from dpulr.mechanisms.hidden_direction import BoundHiddenDirection
from dpulr.model.replay import Forward
from dpulr.randomness import Directions
from dpulr.runs.training import Recipe
from reproduction.results_file import found
from reproduction.sweep import mean_and_spread, sweep

RATES = (0.4, 0.8, 1.6)
BASE = HiddenDirection(repeats=8, antithetic=False)
PIXELS = 2


@dataclass(frozen=True)
class Shifted(HiddenDirection):
    """Each of `views` shares of the repeats sees the image moved by up to two pixels. A_ik depends on record and repeat: proved."""

    views: int = 4
    name: ClassVar[str] = "hidden-direction, shifted views"

    def bind(self, forward: Forward, *, memory_limit: int | None, seed: int) -> BoundShifted:
        share = replace(self, repeats=self.repeats // self.views)
        return BoundShifted(self, share, forward, memory_limit=memory_limit, seed=seed)


class BoundShifted(BoundHiddenDirection):
    def __init__(self, settings: Shifted, share: Shifted, forward: Forward, *, memory_limit: int | None, seed: int) -> None:
        super().__init__(settings, forward, memory_limit=memory_limit, seed=seed)
        self.views, self.share = settings.views, share

    def total(self, inputs: Any, targets: Any, directions: Directions) -> Tensor:
        for coordinates in self.coordinates:
            coordinates.draw(self._public)
        total = torch.zeros(self.size, device=self.device, dtype=self.dtype)
        parts = self._parts(total)
        whole, self.settings = self.settings, self.share
        for _ in range(self.views):
            clean = self.forward.surviving(shifted(inputs, directions), targets) if len(targets) else None
            if clean is not None:
                self.add(clean, directions, parts)
        self.settings = whole
        return total.div_(self.views)


def shifted(images: Tensor, directions: Directions) -> Tensor:
    """Each image moved by up to PIXELS up or down and left or right. What leaves at one side comes in at the other."""
    height, width = images.shape[-2:]
    moves = directions.normal(len(images), 2).erf().mul(PIXELS + 0.5).round().long().clamp(-PIXELS, PIXELS)
    rows = (torch.arange(height) - moves[:, :1]) % height
    columns = (torch.arange(width) - moves[:, 1:]) % width
    return images[torch.arange(len(images))[:, None, None], :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def variants() -> dict[str, dict[str, tuple[HiddenDirection, dict[str, Any]]]]:
    """Group: {label: (mechanism, changes to the recipe)}. The last group changes many things at once."""

    def one(**changes: Any) -> tuple[HiddenDirection, dict[str, Any]]:
        return replace(BASE, **changes), {}

    def other(**changes: Any) -> tuple[HiddenDirection, dict[str, Any]]:
        return BASE, changes

    return {
        "subspace": {"none" if m is None else str(m): one(subspace=m) for m in (4, 16, 32, 64, None)},
        "batch size": {str(size): other(batch_size=size) for size in (500, 2_000, 8_000)},
        "repeats, 4 dimensions each": {str(k): one(repeats=k) for k in (1, 4, 8, 16, 64)},
        "two-sided": {
            "no, 8 directions": one(),
            "yes, 4 directions (as many passes)": one(repeats=4, subspace=32, antithetic=True),
            "yes, 8 directions (twice the passes)": one(antithetic=True),
        },
        "bit": {"sign": one(), **{f"clip, kappa = {kappa:g}": one(kappa=kappa) for kappa in (0.001, 0.1)}},
        "frames": {f"{size} directions": one(frames=size) for size in (1, 8)},
        "last layer": {"hidden": one(), "exact": one(last_layer="exact")},
        "layer weights": {"auto": one(), "equal": one(layer_weights=(1.0, 1.0, 1.0, 1.0))},
        "radius": {f"{radius:g}": one(radius=radius) for radius in (0.01, 0.03, 0.1, 0.3)},
        "momentum": {f"{beta:g}": other(momentum=beta) for beta in (0.0, 0.9)},
        "schedule": {"cosine": other(), "constant": other(schedule="constant")},
        "averaging": {
            "none": other(),
            "EMA 0.95": other(average=0.95),
            "EMA 0.95, constant rate": other(average=0.95, schedule="constant"),
        },
        "views": {"one": one(), "4, moved by up to 2 pixels": (Shifted(**vars(BASE)), {})},
        "inputs": {
            "(x - 0.1) / 0.3": other(),
            "x in [0, 1]": other(rescale=(0.1, 0.3)),
            "x in [-1, 1]": other(rescale=(-0.8, 0.6)),
        },
        "together": {
            "all as above": other(),
            "all plain": (
                HiddenDirection(repeats=8, subspace=None, layer_weights=(1.0, 1.0, 1.0, 1.0)),
                {"momentum": 0.0, "schedule": "constant", "rescale": (0.1, 0.3), "batch_size": 500},
            ),
            "16 directions, radius 0.03": one(repeats=16, radius=0.03),
            "32 directions, 64 dimensions, radius 0.03": one(repeats=32, subspace=64, radius=0.03),
        },
    }


def recipes(mechanism: HiddenDirection, changes: dict[str, Any], seed: int) -> list[Recipe]:
    """One recipe for each learning rate. Momentum changes what a rate means: the sum of a step's effects is kept."""
    settings = {"batch_size": 2_000, "epochs": 5, "target_epsilon": 1.0, "holdout": 10_000, "seed": seed} | changes
    scale = (1 - settings.get("momentum", 0.9)) / 0.1
    return [Recipe(mechanism, learning_rate=round(scale * rate, 3), **settings) for rate in RATES]


def best(results: list[dict[str, Any]]) -> int:
    return max(range(len(results)), key=lambda i: results[i]["test_accuracy"])


def markdown(seeds: int, file: Path) -> str:
    """What has been run, as tables."""
    lines = []
    for group, members in variants().items():
        rows = []
        for label, variant in members.items():
            first = found(recipes(*variant, 0), file)
            if len(first) < len(RATES):
                continue
            chosen = best(first)
            results = found([recipes(*variant, seed)[chosen] for seed in range(seeds)], file)
            mean, spread = mean_and_spread(results)
            rate = results[0]["recipe"]["learning_rate"]
            rows.append(
                f"| {label} | {100 * mean:.2f} ± {100 * spread:.2f} ({len(results)}) | {rate:g} | {first[chosen]['seconds']:.0f} |"
            )
        if rows:
            lines += [f"| {group} | accuracy (%) | learning rate | seconds |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines) or "Not run yet."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="*", choices=list(variants()), default=list(variants()), help="which to run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path("results/options.json"))
    options = parser.parse_args()
    for group in options.groups:
        for variant in variants()[group].values():
            chosen = best(sweep(recipes(*variant, 0), options.results))
            sweep([recipes(*variant, seed)[chosen] for seed in range(1, options.seeds)], options.results)
    print(markdown(options.seeds, options.results))


if __name__ == "__main__":
    main()
