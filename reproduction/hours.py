"""How long the studies take: an estimate from the seconds of the results that are there."""

from __future__ import annotations

from typing import Any

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


class Hours:
    """An estimate for one core, from the seconds of the results that are there: those of the runs most alike, by epoch."""

    def __init__(self) -> None:
        self._per_epoch: dict[str, float | None] = {}

    def of(self, runs: list[Run]) -> float:
        return sum(run.settings.epochs * self._seconds(run.file, run.describe()) for run in runs) / 3600

    def _seconds(self, file: str, values: dict[str, Any]) -> float:
        """Of an epoch; 0 where nothing is like it."""
        for names in _ALIKE:
            wanted = {name: values[name] for name in names}
            known = f"{file} {wanted!r}"
            if known not in self._per_epoch:
                self._per_epoch[known] = _mean(file, wanted)
            found = self._per_epoch[known]
            if found is not None:
                return found
        return 0.0


def _mean(own: str, wanted: dict[str, Any]) -> float | None:
    """Seconds per epoch of the results that these words describe."""
    alike = [r for file in sorted({"paper.json", "certified.json", "held-out.json", own}) for r in described(file, **wanted)]
    return sum(r["seconds"] / r["run"]["epochs"] for r in alike) / len(alike) if alike else None


def listing(seeds: int) -> str:
    """All studies: how many runs, how many are known, and about how many hours the others take on one core."""
    rows, hours = [], Hours()
    for study in studies().values():
        runs = study.runs(study.choice(seeds=seeds))
        missing = [run for run in runs if not found([run])]
        counts = [f"{len(runs)}", f"{hours.of(runs):.1f}", f"{len(missing)}", f"{hours.of(missing):.1f}"]
        rows.append([study.name, f"{study.epochs}", *counts, study.about])
    rows += [[name, "-", "-", all_hours, "-", "-", about] for name, (all_hours, about) in OTHERS.items()]
    return table(["study", "epochs", "runs", "hours", "of them to run", "hours", "what"], rows)
