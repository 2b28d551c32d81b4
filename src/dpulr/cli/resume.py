"""`dpulr resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpulr.cli.options import AsJson, Logs, Restarts, Unprotected, Workers, spellings
from dpulr.distributed.launch import joined, launch


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
    log: Logs = None,
    as_json: AsJson = False,
    workers: Workers = None,
    restarts: Restarts = 0,
    rank_timeout: Annotated[
        float | None, typer.Option(help="Seconds that a process waits for another, if it is to change.")
    ] = None,
) -> None:
    """Go on with a run that was interrupted, killed or crashed. What it has spent counts."""
    if workers is not None and workers > 1:
        given = {"--target-epsilon": target_epsilon, "--steps": steps, "--rank-timeout": rank_timeout}
        flags = {"--show-unprotected": show_unprotected, "--json": as_json}
        options = [text for name, value in given.items() if value is not None for text in (name, str(value))]
        options += [text for name in log or () for text in ("--log", name)]
        raise typer.Exit(
            launch(workers, ["resume", str(run), *options, *(name for name, on in flags.items() if on)], restarts=restarts)
        )
    with joined():
        from dpulr.cli.progress import logged, make_view
        from dpulr.runs import run as runs

        changed: dict[str, Any] = {"target_epsilon": target_epsilon, "steps": steps, "rank_timeout": rank_timeout}
        with logged(make_view(as_json=as_json), log, run) as view:
            view.result(runs.resume(run, view, **changed, show_unprotected=show_unprotected))
