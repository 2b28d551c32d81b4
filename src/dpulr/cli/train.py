"""`dpulr train`."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from dpulr.cli.options import AsJson, Logs, Restarts, Sets, Unprotected, Workers, new_folder, takes_settings
from dpulr.distributed.launch import joined, launch, restarted, under_torchrun
from dpulr.errors import UsageError
from dpulr.runs.config_files import read_config, split_invocation
from dpulr.runs.settings import Settings


@takes_settings
def train(
    options: dict[str, Any],
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default a new one under runs/.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings, or the config.json of another run.")] = None,
    sets: Sets = None,
    allow_uncertified: Annotated[bool, typer.Option("--allow-uncertified", help="Train even without any guarantee.")] = False,
    show_unprotected: Unprotected = False,
    log: Logs = None,
    as_json: AsJson = False,
    workers: Workers = None,
    restarts: Restarts = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the settings as JSON and stop.")] = False,
) -> None:
    """Train a model privately. Without options: MNIST, the paper's MLP, hidden-direction, epsilon 1."""
    values, how = split_invocation({} if config is None else read_config(config))
    settings = Settings.build(values, options, sets or ())
    if dry_run:
        print(settings.to_json().decode(), end="")
        return
    if out is None and how.out is None and under_torchrun():
        raise UsageError("under torchrun give --out: all processes, and those of a restart, must mean the same folder.")
    folder = out or (Path(how.out) if how.out is not None else _default_folder(settings))
    flags = {
        "--allow-uncertified": allow_uncertified or how.allow_uncertified,
        "--show-unprotected": show_unprotected or how.show_unprotected,
        "--json": as_json or how.json,
    }
    if workers is not None and workers > 1:
        with TemporaryDirectory() as place:
            config = Path(place) / "config.json"
            config.write_bytes(settings.to_json())
            arguments = ["train", "--config", str(config), "--out", str(folder), *(name for name, on in flags.items() if on)]
            arguments += [text for name in log or () for text in ("--log", name)]
            raise typer.Exit(launch(workers, arguments, restarts=restarts))
    with joined():
        from dpulr.cli.progress import logged, make_view
        from dpulr.distributed.ranks import join
        from dpulr.runs import run
        from dpulr.runs.folder import CONFIG

        with logged(make_view(as_json=flags["--json"]), log, folder) as view:
            shown, timeout = flags["--show-unprotected"], settings.rank_timeout
            if restarted() and join(timeout=timeout).shared(lambda: (folder / CONFIG).exists()):
                result = run.resume(folder, view, show_unprotected=shown, rank_timeout=timeout)
            else:
                result = run.start(settings, folder, view, allow_uncertified=flags["--allow-uncertified"], show_unprotected=shown)
            view.result(result)


def _default_folder(settings: Settings) -> Path:
    """Named by the data and the mechanism: a path by its last part, and without ":", which Windows has in no name."""
    dataset = re.split(r"[/\\]", settings.dataset)[-1]
    return new_folder(f"{dataset}-{settings.mechanism}".replace(":", "."))
