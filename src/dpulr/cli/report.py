"""`dpulr report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folder of a run; several for a comparison.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file; by default report.html in the run.")] = None,
) -> None:
    """Write one self-contained HTML file about a run, or comparing several."""
    from dpulr.runs import report as reports

    print(reports.write(runs, out))
