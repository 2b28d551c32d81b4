"""All commands in one place."""

from __future__ import annotations

from typing import Annotated

import typer

from dpulr.cli import audit, data, evaluate, plan, report, train

app = typer.Typer(
    name="dpulr",
    help="Train PyTorch models with differential privacy, by forward passes alone.",
    no_args_is_help=True,
    add_completion=False,
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
        raise typer.Exit(2)


app.command("train")(train.train)
app.command("resume")(train.resume)
app.command("plan")(plan.plan)
app.command("audit")(audit.audit)
app.command("report")(report.report)
app.command("evaluate")(evaluate.evaluate)
app.add_typer(data.data, name="data")
