"""Fill docs/results.md and docs/paper.md from the results files: the tables between their marks, and the pictures of the first.

python -m reproduction.results_page
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reproduction import options, paper_tables, table
from reproduction.paper_numbers import TABLE1
from reproduction.results_file import found
from reproduction.sweep import mean_and_spread

SEEDS = 3
CIFAR_EPOCHS, SIZE_EPOCHS, REPEATS_EPOCHS, BASELINES_EPOCHS = 1, 1, 3, 3  # what has been run of docs/paper.md
OURS, THEIRS, PAPER = "#1f6fb4", "#c8553d", "#8a8a8a"


def fill(page: Path, parts: dict[str, str]) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- end -->`."""
    text = page.read_text()
    for name, part in parts.items():
        if text.count(f"<!-- {name} -->\n") != 1:
            raise ValueError(f"{page} must have one place for {name!r}.")
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n{part}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    page.write_text(text)


def draw(study: str, file: Path, picture: Path) -> None:
    """Accuracy against epsilon, mean and spread over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = table.studies()[study]
    figure, axis = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for method, color, marker in (("hidden-direction", OURS, "o"), ("dp-sgd", THEIRS, "s")):
        points = []
        for epsilon in sorted(chosen.epsilons):
            results = found([table.recipe(study, method, epsilon, seed) for seed in range(SEEDS)], file)
            if results:
                points.append((epsilon, *(100 * value for value in mean_and_spread(results))))
        label = "hidden-direction (forward passes only)" if method == "hidden-direction" else "DP-SGD, Opacus (backpropagation)"
        if points:
            epsilons, means, spreads = zip(*points, strict=True)
            axis.errorbar(epsilons, means, spreads, color=color, marker=marker, markersize=4, capsize=2, linewidth=1.4, label=label)
    if study == "mnist":
        best = [max(columns[1::2]) for row in TABLE1.values() for columns in row.values()]
        axis.plot(chosen.epsilons, best, "x", color=PAPER, label="the better of the paper's two columns")
    axis.set_xscale("log")
    if study != "mnist":
        axis.set_xticks(chosen.epsilons, [f"{epsilon:g}" for epsilon in chosen.epsilons])
        axis.minorticks_off()
    axis.set_xlabel("epsilon (delta = 1e-5)")
    axis.set_ylabel("test accuracy (%)")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, loc="lower right")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def verdict(study: str, file: Path) -> str:
    """How the means compare, row by row, in one sentence each."""
    chosen = table.studies()[study]
    paper = [max(columns[1::2]) for row in TABLE1.values() for columns in row.values()]
    gaps: list[float] = []
    above = 0
    for i, epsilon in enumerate(chosen.epsilons):
        means: list[Any] = []
        for method in chosen.methods:
            results = found([table.recipe(study, method, epsilon, seed) for seed in range(SEEDS)], file)
            means.append(100 * mean_and_spread(results)[0] if results else None)
        if None not in means:
            gaps.append(means[1] - means[0])
        above += study == "mnist" and means[0] is not None and means[0] >= paper[i]
    lines = []
    if study == "mnist":
        lines.append(f"At least the better of the paper's two columns in {above} of {len(chosen.epsilons)} settings.")
    if gaps:
        within = sum(gap <= 1 for gap in gaps)
        lines.append(
            f"Within 1 point of DP-SGD in {within} of {len(gaps)}; DP-SGD leads by {sum(gaps) / len(gaps):.2f} points on average, "
            f"by {max(gaps):.2f} at most, by {min(gaps):.2f} at least (negative: hidden-direction leads)."
        )
    return " ".join(lines)


def paper_parts(results: Path) -> dict[str, str]:
    """The tables of docs/paper.md, by the names of their commands."""
    runs, certified, images = results / "table1.json", results / "mnist-table.json", results / "cifar.json"
    settings, sizes = list(paper_tables.SETTINGS.values()), list(paper_tables.SIZES.values())
    cifar = [run for label in ("dp-sgd", *paper_tables.CIFAR) for run in paper_tables.cifar_runs(label, 0, CIFAR_EPOCHS)]
    repeats = [run for batch in (64, 500) for run in paper_tables.repeats_runs(batch, 4.0, 0, REPEATS_EPOCHS)]
    return {
        "table1": paper_tables.table1(settings, runs, certified, SEEDS, paper_tables.EPOCHS),
        "growth": paper_tables.growth(settings, runs),
        "repeats": paper_tables.listing(repeats, runs),
        "model-size": paper_tables.model_size(sizes, runs, SEEDS, SIZE_EPOCHS),
        "cifar": paper_tables.listing(cifar, images),
        "baselines": paper_tables.baselines(runs, certified, SEEDS, BASELINES_EPOCHS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--pages", type=Path, default=Path("docs"))
    chosen = parser.parse_args()
    parts = {"options": options.markdown(SEEDS, chosen.results / "options.json")}
    for study in table.studies():
        file = chosen.results / f"{study}-table.json"
        parts[study] = table.markdown(study, SEEDS, file) + "\n\n" + verdict(study, file)
        if file.exists():
            draw(study, file, chosen.pages / "images" / f"results-{study}.png")
    fill(chosen.pages / "results.md", parts)
    fill(chosen.pages / "paper.md", paper_parts(chosen.results))
    print(f"Filled results.md and paper.md in {chosen.pages}.")


if __name__ == "__main__":
    main()
