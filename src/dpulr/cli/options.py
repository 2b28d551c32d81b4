"""Options that commands share. Those of settings are made from `Settings`: no default and no help text is written twice."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from dpulr.runs.settings import NAMES, Settings, types_of

SPELLINGS = {"target_epsilon": "--epsilon", "target_delta": "--delta", "learning_rate": "--lr"}
"""Second spellings: each works wherever the first does."""

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object per line, for machines.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change any setting; the last wins.")]
Logs = Annotated[
    list[str] | None, typer.Option("--log", help="Also write what is public to tensorboard (in the run's folder) or to mlflow.")
]
Workers = Annotated[int | None, typer.Option(min=1, help="Train in so many processes on this machine, by torchrun.")]
Restarts = Annotated[
    int, typer.Option(min=0, help="With --workers: how often all processes start again, and go on, after one has failed.")
]
Unprotected = Annotated[
    bool,
    typer.Option(
        "--show-unprotected", help="Also show and store batch sizes and training losses. The guarantee does not cover them."
    ),
]


def takes_settings(body: Callable[..., None]) -> Callable[..., None]:
    """A command whose first argument is the dictionary of those settings that were given, each by an option of its own."""
    hints = get_type_hints(body, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in list(inspect.signature(body).parameters.values())[1:]]

    @functools.wraps(body)
    def command(**given: Any) -> None:
        values = {name: given.pop(name) for name in NAMES}
        body({name: value for name, value in values.items() if value is not None}, **given)

    parameters = [*map(setting, NAMES), *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def setting(name: str) -> inspect.Parameter:
    """The option of one setting."""
    item = next(item for item in fields(Settings) if item.name == name)
    kinds = [kind for kind in types_of(name) if kind is not type(None)]
    kind = kinds[0] if len(kinds) == 1 else str
    default = "" if item.default is None else f" [default: {item.default}]"
    option = typer.Option(*spellings(name), help=item.metadata["help"] + default)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


def spellings(name: str) -> list[str]:
    return [f"--{name.replace('_', '-')}", *([SPELLINGS[name]] if name in SPELLINGS else [])]


def new_folder(name: str) -> Path:
    """A folder in runs/ that is not there yet, named by the time. Of several in one second the later ones are numbered."""
    first = Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    others = (first.with_name(f"{first.name}-{i}") for i in itertools.count(2))
    return next(folder for folder in itertools.chain([first], others) if not folder.exists())
