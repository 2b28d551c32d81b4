"""`dpulr train`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from dpulr.cli.options import AsJson, Sets, Unprotected, takes_settings
from dpulr.runs.settings import Settings, read_config, split_invocation


@takes_settings()
def train(
    options: dict[str, Any],
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default a new one under runs/.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings, or the config.json of another run.")] = None,
    sets: Sets = None,
    allow_uncertified: Annotated[bool, typer.Option("--allow-uncertified", help="Train even without any guarantee.")] = False,
    show_unprotected: Unprotected = False,
    as_json: AsJson = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the settings as JSON and stop.")] = False,
) -> None:
    """Train a model privately. Without options: MNIST, the paper's MLP, hidden-direction, epsilon 1."""
    values, how = split_invocation({} if config is None else read_config(config))
    settings = Settings.build(values, options, sets or ())
    if dry_run:
        print(settings.to_json().decode(), end="")
        return
    from dpulr.cli.progress import make_view
    from dpulr.runs import run

    folder = out or (Path(how.out) if how.out is not None else _default_folder(settings))
    with make_view(as_json=as_json or how.json) as view:
        result = run.start(
            settings,
            folder,
            view,
            allow_uncertified=allow_uncertified or how.allow_uncertified,
            show_unprotected=show_unprotected or how.show_unprotected,
        )
        view.result(result)


def _default_folder(settings: Settings) -> Path:
    dataset = settings.dataset.replace(":", ".").replace("/", ".")
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{dataset}-{settings.mechanism}"
