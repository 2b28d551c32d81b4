"""`dpulr train` and `dpulr resume`."""

from __future__ import annotations

import inspect
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from dpulr.runs.settings import NAMES, Settings, invocation

_FLAG = "Also show and store batch sizes and training losses. The guarantee does not cover them."
_JSON = "One JSON object a line, for machines."


def train(
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default a new one under runs/.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings, or the config.json of another run.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change any setting; the last wins.")] = None,
    allow_uncertified: Annotated[
        bool, typer.Option("--allow-uncertified", help="Train even if no guarantee can be certified.")
    ] = False,
    show_unprotected: Annotated[bool, typer.Option("--show-unprotected", help=_FLAG)] = False,
    as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the settings as JSON and stop.")] = False,
    **options: Any,
) -> None:
    """Train a model privately. Without options: MNIST, the paper's MLP, hidden-direction, epsilon 1."""
    given = {name: value for name, value in options.items() if value is not None}
    settings, how = Settings.build(config, given, sets or ()), invocation(config)
    if dry_run:
        print(settings.to_json().decode(), end="")
        return
    from dpulr.cli.live import make_view
    from dpulr.runs import run as running

    if out is None:
        out = Path(how["out"]) if "out" in how else _default_folder(settings)
    with make_view(as_json=as_json or how.get("json", False)) as view:
        result = running.start(
            settings,
            out,
            view,
            allow_uncertified=allow_uncertified or how.get("allow_uncertified", False),
            show_unprotected=show_unprotected or how.get("show_unprotected", False),
        )
        view.result(result)


def resume(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    target_epsilon: Annotated[
        float | None, typer.Option(help="Raise the budget to this epsilon. It is recorded in the ledger.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Total number of steps, if it is to change. With a raised budget: default as many as fit.")
    ] = None,
    show_unprotected: Annotated[bool, typer.Option("--show-unprotected", help=_FLAG)] = False,
    as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False,
) -> None:
    """Go on with a run that was interrupted, killed or crashed. What it has spent counts."""
    from dpulr.cli.live import make_view
    from dpulr.runs import run as running

    with make_view(as_json=as_json) as view:
        result = running.resume(run, view, target_epsilon=target_epsilon, steps=steps, show_unprotected=show_unprotected)
        view.result(result)


def _default_folder(settings: Settings) -> Path:
    dataset = settings.dataset.replace(":", ".").replace("/", ".")
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{dataset}-{settings.mechanism}"


def _add_settings() -> None:
    """One option for each setting, with its help and default, so that none of them is written down twice."""
    own = [p for p in inspect.signature(train).parameters.values() if p.kind is not p.VAR_KEYWORD]
    hints = get_type_hints(Settings)
    extra = []
    for item in fields(Settings):
        if item.name in NAMES:
            kind: Any = str if item.name == "rejection_threshold" else hints[item.name]
            default = "" if item.default is None else f" [default: {item.default}]"
            annotation = Annotated[kind | None, typer.Option(help=item.metadata["help"] + default)]
            extra.append(inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    resolved = get_type_hints(train, include_extras=True)
    parameters = [*extra, *(p.replace(annotation=resolved[p.name], kind=p.KEYWORD_ONLY) for p in own)]
    train.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    train.__annotations__ = {p.name: p.annotation for p in parameters}


_add_settings()
