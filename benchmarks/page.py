"""Tables and pictures of docs/performance.md, from results/bench.json; `python -m reproduction pages` puts them there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import results, time_to_accuracy
from benchmarks.bench import FOUR, GHOST, GRADIENT, HOOKS, ONE, PLAIN
from reproduction.certified import epsilon_of
from reproduction.pages import table

COLORS = {PLAIN: "#8a8a8a", GHOST: "#c8553d", HOOKS: "#e0a458", ONE: "#1f6fb4"}
PAPER, PASSES, NAIVE = "paper, K = 16", "passes of paper, K = 16", "naive DP-ULR, K = 16"


def parts() -> dict[str, str]:
    """The parts of docs/performance.md."""
    found = results.read()
    start = found["start"]
    return {
        "time": time_at_equal_accuracy(found.get("time_to_accuracy", {})),
        "ratios": ratios(found["seconds_a_step"]),
        "steps": steps(found["seconds_a_step"]),
        "memory": memory(found["memory"]),
        "depth": depth(found["growth"]["layers"]),
        "start": starts(start),
        "shares": shares(found["hidden_step"]),
    }


def starts(found: dict[str, Any]) -> str:
    """The first step of each model, and what of it torch takes to make an optimizer."""
    first = found.get("first_step") or {"mnist": {"seconds": found["first_step_seconds"]}}  # older results have one model
    text = (
        f"First step {first['mnist']['seconds']:.2f} s after torch is imported; sampling takes {found['sampling_share']:.1%} of a "
        "step (60,000 records, batches of 500)."
    )
    if len(first) == 1:
        return text
    names = {"mnist": "MLP on MNIST, noise given", "mlp": "2 layers", "resnet5": "ResNet-5", "deep": "16 layers of width 20"}
    rows = [[names[name], f"{own['seconds']:.2f}", f"{own['optimizer']:.2f}"] for name, own in first.items()]
    return f"{text}\n\n{table(['model', 'first step, s', 'of it torch makes the optimizer, s'], rows)}"


def paper_cost() -> str:
    """For docs/paper.md: a step of DP-ULR beside Opacus, and where its time goes."""
    found = results.read()
    case = found["seconds_a_step"]["mlp, batch 500"]
    beside = [[peer, f"{1e3 * case[peer]:.3g}", f"{case[PAPER] / case[peer]:.3g}"] for peer in (PAPER, PASSES, GHOST, HOOKS, NAIVE)]
    rows = []
    for row in found["paper_step"]:
        milliseconds = [f"{1e3 * value:.1f}" for value in (row["seconds"], *row["parts"].values())]
        rows.append([row["model"], f"{row['K']}", f"{row['batch']}", *milliseconds])
    heads = ["model", "K", "batch", "all", *found["paper_step"][0]["parts"]]
    return f"{table(['batch 500', 'ms per step', 'DP-ULR takes so many times as long'], beside)}\n\n{table(heads, rows)}"


def time_at_equal_accuracy(known: dict[str, Any]) -> str:
    """CPU seconds of the shortest training that reaches the paper's accuracy, by method and epsilon."""
    rows = []
    for batch, sigma0 in time_to_accuracy.SETTINGS:
        epsilon, wanted = epsilon_of(batch, sigma0), time_to_accuracy.target(batch, sigma0)
        cells = []
        for method in time_to_accuracy.METHODS:
            curve = time_to_accuracy.curve(known, method, epsilon)
            reached = [point for point in curve if point[2] >= wanted]
            if reached:
                cells.append(f"{reached[0][1]:.1f} s ({reached[0][0]} epochs, {reached[0][2]:.1%})")
            else:
                cells.append(f"not in {curve[-1][0]} epochs ({max(point[2] for point in curve):.1%})" if curve else "-")
        rows.append([f"{epsilon:.2f}", f"{wanted:.1%}", *cells])
    return table(["epsilon", "accuracy to reach", *time_to_accuracy.METHODS], rows)


def ratios(times: dict[str, dict[str, float]]) -> str:
    """How long a step takes, in steps of others."""
    rows = []
    for case, row in times.items():
        for peer in (GRADIENT, ONE, FOUR):
            rows.append([case, peer, *(f"{row[peer] / row[other]:.2g}" for other in (PLAIN, GHOST, HOOKS))])
    return table(["case", "a step of", "in steps of plain SGD", "of Opacus, ghost", "of Opacus, hooks"], rows)


def steps(times: dict[str, dict[str, float]]) -> str:
    names = list(dict.fromkeys(peer for row in times.values() for peer in row))
    rows = [[name, *(f"{1e3 * row[name]:.3g}" if name in row else "" for row in times.values())] for name in names]
    return table(["milliseconds per step", *times], rows)


def memory(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        plain, hidden = row["plain"] / 1e6, row["hidden"] / 1e6
        alone = [f"{row[name] / 1e6:.0f}" for name in ("plain_step", "hidden_step")]
        lines.append([row["model"], f"{row['batch']}", f"{plain:.0f}", f"{hidden:.0f}", f"{hidden / plain:.2f}", *alone])
    heads = ["model", "batch", "plain SGD, MB", "hidden-direction, MB", "ratio", "plain, steps alone", "ours, steps alone"]
    return table(heads, lines)


def depth(curve: dict[str, Any]) -> str:
    """What a step costs in forward passes, taking a plain step (forward and backward) for three of them."""
    rows = [
        [f"{layers}", f"{1e3 * hidden:.3g}", f"{1e3 * plain:.3g}", f"{3 * hidden / plain:.3g}", f"{1 + layers}"]
        for layers, hidden, plain in zip(curve["values"], curve["hidden"], curve["plain"], strict=True)
    ]
    return table(["layers", "hidden-direction, ms", "plain SGD, ms", "in forward passes", "bound"], rows)


def shares(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            f"{row['directions']}",
            f"{row['batch']}",
            f"{1e3 * row['seconds']:.2f}",
            *(f"{share:.0%}" for share in row["shares"].values()),
        ]
        for row in rows
    ]
    return table(["directions", "batch size", "ms", *rows[0]["shares"]], lines)


# --- pictures -------------------------------------------------------------------------------------------------------------
def draw(images: Path) -> None:
    found = results.read()
    draw_steps(found["seconds_a_step"], images / "performance-steps.png")
    draw_growth(found["growth"], images / "performance-growth.png")
    if "time_to_accuracy" in found:
        draw_time(found["time_to_accuracy"], images / "performance-time.png")


def draw_steps(times: dict[str, dict[str, float]], picture: Path) -> None:
    """Time of a step over that of plain SGD, by batch size."""
    cases = [name for name in times if name.startswith("mlp")]
    cases.sort(key=lambda name: int(name.rsplit(" ", 1)[1]))
    plt = _pyplot()
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
    plt.close(figure)


def draw_time(known: dict[str, Any], picture: Path) -> None:
    """Accuracy against CPU seconds: every point is a whole private run."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, len(time_to_accuracy.SETTINGS), figsize=(14, 3.6), layout="constrained")
    colors = dict(zip(time_to_accuracy.METHODS, ("#1f6fb4", "#2a9d6f", "#c8553d", "#8a8a8a"), strict=True))
    for axis, (batch, sigma0) in zip(axes, time_to_accuracy.SETTINGS, strict=True):
        epsilon = epsilon_of(batch, sigma0)
        for method, color in colors.items():
            curve = time_to_accuracy.curve(known, method, epsilon)
            axis.plot([p[1] for p in curve], [100 * p[2] for p in curve], "o-", color=color, label=method, markersize=4)
        axis.axhline(100 * time_to_accuracy.target(batch, sigma0), color="#444444", linewidth=0.8, linestyle=":")
        axis.semilogx()
        axis.set_title(f"epsilon {epsilon:.2f}", fontsize=9)
        axis.set_xlabel("CPU seconds")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("test accuracy, %")
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def draw_growth(growth: dict[str, Any], picture: Path) -> None:
    plt = _pyplot()
    figure, axes = plt.subplots(1, 5, figsize=(16, 3.2), layout="constrained")
    for axis, (name, curve) in zip(axes, growth.items(), strict=True):
        axis.loglog(curve["values"], [1e3 * v for v in curve["hidden"]], "o-", color=COLORS[ONE], label="hidden-direction")
        axis.loglog(curve["values"], [1e3 * v for v in curve["plain"]], "s-", color=COLORS[PLAIN], label="plain SGD")
        axis.set_xlabel(name)
        axis.set_xticks(curve["values"], [str(value) for value in curve["values"]], fontsize=8)
        axis.minorticks_off()
        axis.set_title(f"grows like {name.split(',')[0]}^{curve['exponent']:.2f}", fontsize=9)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("milliseconds per step")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
