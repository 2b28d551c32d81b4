"""How long the studies take: an estimate from the seconds of the results that are there."""

from __future__ import annotations

from reproduction.pages import table
from reproduction.results_file import described, found
from reproduction.run import Run
from reproduction.studies import OTHERS, studies

_ALIKE = (  # what the time of an epoch depends on, first the closest likeness
    ("loop", "mechanism", "model", "dataset", "batch_size", "repeats"),
    ("loop", "mechanism", "model", "dataset", "repeats"),
    ("loop", "mechanism", "model", "dataset"),
    ("loop", "mechanism"),
)


def hours(runs: list[Run]) -> float:
    """An estimate for one core, from the seconds of the results that are there: those of the runs most alike, by epoch."""
    total = 0.0
    for run in runs:
        values = run.describe()
        for names in _ALIKE:
            alike = [
                r
                for file in ("paper.json", "certified.json", "held-out.json")
                for r in described(file, **{n: values[n] for n in names})
            ]
            if alike:
                total += run.settings.epochs * sum(r["seconds"] / r["run"]["epochs"] for r in alike) / len(alike)
                break
    return total / 3600


def listing(seeds: int) -> str:
    """All studies: how many runs, how many are known, and about how many hours the others take on one core."""
    rows = []
    for study in studies().values():
        runs = study.runs(study.choice(seeds=seeds))
        missing = [run for run in runs if not found([run])]
        counts = [f"{len(runs)}", f"{hours(runs):.1f}", f"{len(missing)}", f"{hours(missing):.1f}"]
        rows.append([study.name, f"{study.epochs}", *counts, study.about])
    rows += [[name, "-", "-", all_hours, "-", "-", about] for name, (all_hours, about) in OTHERS.items()]
    return table(["study", "epochs", "runs", "hours", "of them to run", "hours", "what"], rows)
