"""Fill docs/performance.md from results/bench.json: tables between its marks, pictures beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from bench import GHOST, HOOKS, ONE, PLAIN, report_goals, table
from reproduction.results_page import fill

COLORS = {PLAIN: "#8a8a8a", GHOST: "#c8553d", HOOKS: "#e0a458", ONE: "#1f6fb4"}


def draw_steps(times: dict[str, dict[str, float]], picture: Path) -> None:
    """Time of a step over that of plain SGD, by batch size."""
    cases = [name for name in times if name.startswith("mlp")]
    cases.sort(key=lambda name: int(name.rsplit(" ", 1)[1]))
    figure, axis = plt.subplots(figsize=(7.5, 4), layout="constrained")
    peers = [PLAIN, ONE, "hidden-direction, K = 4", GHOST, HOOKS]
    width = 0.8 / len(peers)
    for i, peer in enumerate(peers):
        values = [times[case][peer] / times[case][PLAIN] for case in cases]
        color = COLORS.get(peer, "#7fb2d9")
        bars = axis.bar([j + i * width for j in range(len(cases))], values, width, color=color, label=peer)
        axis.bar_label(bars, fmt="%.2g", fontsize=7)
    axis.set_yscale("log")
    axis.set_xticks([j + 0.4 - width / 2 for j in range(len(cases))], [case.split(", ")[1] for case in cases])
    axis.set_ylabel("time of a step / plain SGD")
    axis.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.savefig(picture, dpi=130)


def draw_growth(growth: dict[str, Any], picture: Path) -> None:
    figure, axes = plt.subplots(1, 5, figsize=(16, 3.2), layout="constrained")
    for axis, (name, curve) in zip(axes, growth.items(), strict=True):
        axis.loglog(curve["values"], [1e3 * v for v in curve["hidden"]], "o-", color=COLORS[ONE], label="hidden-direction")
        axis.loglog(curve["values"], [1e3 * v for v in curve["plain"]], "s-", color=COLORS[PLAIN], label="plain SGD")
        axis.set_xlabel(name)
        axis.set_xticks(curve["values"], [str(value) for value in curve["values"]], fontsize=8)
        axis.minorticks_off()
        axis.set_title(f"grows like {name.split(',')[0]}^{curve['exponent']:.2f}", fontsize=9)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("milliseconds a step")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(picture, dpi=130)


def memory_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | batch | plain SGD, MB | hidden-direction, MB | ratio | plain, steps alone | ours, steps alone |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        plain, hidden = row["plain"] / 1e6, row["hidden"] / 1e6
        lines.append(
            f"| {row['model']} | {row['batch']} | {plain:.0f} | {hidden:.0f} | {hidden / plain:.2f} | "
            f"{row['plain_step'] / 1e6:.0f} | {row['hidden_step'] / 1e6:.0f} |"
        )
    return "\n".join(lines)


def depth(curve: dict[str, Any]) -> str:
    """What a step costs in forward passes, taking a plain step (forward and backward) for three of them."""
    lines = ["| layers | hidden-direction, ms | plain SGD, ms | in forward passes | bound |", "|---|---|---|---|---|"]
    for layers, hidden, plain in zip(curve["values"], curve["hidden"], curve["plain"], strict=True):
        lines.append(f"| {layers} | {1e3 * hidden:.3g} | {1e3 * plain:.3g} | {3 * hidden / plain:.3g} | {1 + layers} |")
    return "\n".join(lines)


def main() -> None:
    results = json.loads(Path("results/bench.json").read_text())
    images = Path("docs/images")
    draw_steps(results["seconds_a_step"], images / "performance-steps.png")
    draw_growth(results["growth"], images / "performance-growth.png")
    start = results["start"]
    parts = {
        "goals": report_goals(results["seconds_a_step"])[0],
        "steps": table(results["seconds_a_step"]),
        "memory": memory_table(results["memory"]),
        "depth": depth(results["growth"]["layers"]),
        "start": f"First step {start['first_step_seconds']:.2f} s after torch is imported; sampling takes "
        f"{start['sampling_share']:.1%} of a step (60,000 records, batches of 500).",
    }
    fill(Path("docs/performance.md"), parts)
    print("Filled docs/performance.md.")


if __name__ == "__main__":
    main()
