"""`dpulr evaluate`: how good a saved model is, class by class."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    dataset: Annotated[
        str | None, typer.Option(help="Another data set, whose test part is used; all of a csv: or parquet: file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with the confusion matrix.")] = False,
) -> None:
    """Accuracy, loss, calibration and a table by class, of the model in a run, on held-out data."""
    from dpulr.runs.loading import class_names, load

    model = load(run)
    scores = model.score(dataset)
    classes = scores.classes(class_names(model.settings))
    if as_json:
        print(json.dumps({**asdict(scores), "temperature": model.temperature, "classes": classes}))
        return
    width = max(7, *(len(str(row["class"])) for row in classes))
    print(f"{'class':>{width}} {'records':>8} {'recall':>8} {'precision':>10}")
    for row in classes:
        recall, precision = ("-" if row[key] is None else f"{row[key]:.2%}" for key in ("recall", "precision"))
        print(f"{row['class']:>{width}} {row['records']:>8} {recall:>8} {precision:>10}")
    print(
        f"accuracy {scores.accuracy:.2%}   loss {scores.loss:.4f}   Brier score {scores.brier:.4f}   "
        f"expected calibration error {scores.calibration_error:.4f}"
        f"{'' if model.temperature == 1 else f'   (outputs over a temperature of {model.temperature:.3g})'}"
    )
