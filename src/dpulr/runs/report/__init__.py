"""A run, or several, as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpulr.errors import UsageError
from dpulr.files import replace_file
from dpulr.runs.report.gather import gather
from dpulr.runs.report.page import page

__all__ = ["write"]


def write(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of these runs; by default into the folder of the only one, or else beside the first."""
    if not runs:
        raise UsageError("give at least one run.")
    if out is None:
        out = runs[0] / "report.html" if len(runs) == 1 else runs[0].parent / "comparison.html"
    names = [str(run.name) for run in runs]
    if len(set(names)) < len(names):
        names = [str(run) for run in runs]
    text = page([gather(run, name) for run, name in zip(runs, names, strict=True)])
    replace_file(out, text.encode("utf-8", "replace"))
    return out
