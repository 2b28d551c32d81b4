"""All commands in one place."""

from __future__ import annotations

from typing import Annotated

import typer

from dpulr.cli.audit import audit
from dpulr.cli.data import data
from dpulr.cli.evaluate import evaluate
from dpulr.cli.main import USAGE
from dpulr.cli.plan import plan
from dpulr.cli.report import report
from dpulr.cli.resume import resume
from dpulr.cli.train import train
from dpulr.cli.tune import tune

app = typer.Typer(
    name="dpulr",
    help="Train PyTorch models with differential privacy, by forward passes alone.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _common(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from. It may stand anywhere.")] = False,
) -> None:
    if version:
        from dpulr import __version__

        print(__version__)
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(USAGE)


for command in (train, resume, plan, tune, audit, report, evaluate):
    app.command()(command)
app.add_typer(data, name="data")
