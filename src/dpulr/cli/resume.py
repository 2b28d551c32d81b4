"""`dpulr resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpulr.cli.options import AsJson, Unprotected, spellings


def resume(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    target_epsilon: Annotated[
        float | None,
        typer.Option(*spellings("target_epsilon"), help="Raise the budget to this epsilon. It is recorded in the ledger."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Total number of steps, if it is to change. With a raised budget: default as many as fit.")
    ] = None,
    show_unprotected: Unprotected = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run that was interrupted, killed or crashed. What it has spent counts."""
    from dpulr.cli.progress import make_view
    from dpulr.runs import run as runs

    with make_view(as_json=as_json) as view:
        view.result(runs.resume(run, view, target_epsilon=target_epsilon, steps=steps, show_unprotected=show_unprotected))
