"""All commands in one place."""

from __future__ import annotations

from typing import Annotated

import typer

from dpulr.cli import auditing, datasets, evaluating, planning, reporting, reproducing, training

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


app.command("train")(training.train)
app.command("resume")(training.resume)
app.command("plan")(planning.plan)
app.command("audit")(auditing.audit)
app.command("report")(reporting.report)
app.command("evaluate")(evaluating.evaluate)
app.add_typer(datasets.data, name="data")
app.add_typer(reproducing.reproduce, name="reproduce")
