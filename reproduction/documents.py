"""Which parts of docs/ are filled from results, and by whom; the pictures beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import reproduction
from benchmarks import page as performance
from benchmarks import scale
from reproduction import (
    audit_sweep,
    auto_judge,
    beyond,
    certified,
    errata,
    figure_bound,
    losses,
    options,
    paper_claims,
    paper_figures,
    paper_tables,
    public_features,
    results_file,
    senders,
    texts,
)
from reproduction.pages import differs, fill

# what has been run of docs/paper.md, beside table 1
CIFAR_EPOCHS, SIZE_EPOCHS, REPEATS_EPOCHS, BASELINES_EPOCHS = 1, 1, 3, 3


def results_parts() -> dict[str, str]:
    tables = {dataset: certified.markdown(dataset) for dataset in certified.comparisons()}
    tables |= {"features": public_features.markdown(), "logistic": public_features.logistic(), "senders": senders.markdown()}
    tables |= {"judge": auto_judge.markdown()}
    return tables | {"options": options.markdown(), "removed": options.removed(), "longer": options.longer()}


def paper_parts() -> dict[str, str]:
    cifar = [run for label in paper_tables.CIFAR for run in paper_tables.cifar_runs(label, 0, CIFAR_EPOCHS)]
    repeats = [run for batch in (64, 500) for run in paper_tables.repeats_runs(batch, 4.0, 0, REPEATS_EPOCHS)]
    return {
        "claims": paper_claims.claims(),
        "readings": paper_tables.readings(),
        "table1": paper_tables.table1(),
        "differences": paper_tables.differences(),
        "torch-start": paper_tables.torch_start(),
        "growth": paper_tables.growth(),
        "repeats": paper_tables.listing(repeats),
        "model-size": paper_tables.model_size(epochs=SIZE_EPOCHS),
        "cifar": paper_tables.listing(cifar),
        "baselines": paper_tables.baselines(epochs=BASELINES_EPOCHS),
        "cost": performance.paper_cost(),
    }


PAGES: dict[str, Callable[[], dict[str, str]]] = {
    "results.md": results_parts,
    "paper.md": paper_parts,
    "performance.md": performance.parts,
    "audit.md": audit_sweep.parts,
    "errata.md": errata.parts,
    "losses.md": losses.parts,
    "beyond-backprop.md": beyond.parts,
    "users.md": senders.parts,
    "language-models.md": texts.parts,
    "scale.md": scale.parts,
}


def check(pages: list[str] | None = None, folder: Path = reproduction.DOCS) -> list[str]:
    """What the pages say otherwise than the results."""
    return [f"docs/{page}: {part}" for page in pages or PAGES for part in differs(folder / page, PAGES[page]())]


def write(pages: list[str] | None = None, folder: Path = reproduction.DOCS) -> list[str]:
    """Fill the pages; the names of those that changed."""
    return [page for page in pages or PAGES if fill(folder / page, PAGES[page]())]


def draw(images: Path = reproduction.DOCS / "images") -> None:
    """All pictures of results but the cost of rejection, which is computed (`figure-bound`)."""
    for dataset in certified.comparisons():
        paper_figures.draw_certified(dataset, images / f"results-{dataset}.png")
    public_features.draw(images / "results-features.png")
    paper_figures.draw_dynamics(draw_data(), images / "paper-dynamics.png")
    paper_figures.draw_cifar(images / "paper-cifar.png", epochs=CIFAR_EPOCHS)
    audit_sweep.pictures(images)
    performance.draw(images)
    beyond.draw(images)


def draw_data() -> list[dict[str, object]]:
    """The panels of the dynamics, kept as numbers, too."""
    panels = paper_figures.dynamics()
    (results_file.folder() / "figure-dynamics.json").write_text(json.dumps(panels, indent=1) + "\n")
    return panels


def draw_bound(images: Path = reproduction.DOCS / "images") -> None:
    points = figure_bound.bound_points()
    (results_file.folder() / "figure-bound.json").write_text(json.dumps([asdict(point) for point in points]) + "\n")
    figure_bound.draw(points, str(images / "paper-bound.png"))
