"""`dpulr data`: list and fetch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

data = typer.Typer(help="List the data sets, and fetch them.", no_args_is_help=True, rich_markup_mode=None)


@data.command("list")
def show(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """List the data sets that are known by name, and where they are."""
    from dpulr.data import catalog

    rows = []
    for entry in catalog.ENTRIES.values():
        try:
            place = str(catalog.place(entry)) if entry.files else "in the package"
        except ValueError:
            place = ""
        rows.append({"name": entry.name, "about": entry.about, "place": place})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['name']:14} {row['about']}\n{'':14} {row['place'] or 'not here; dpulr data fetch ' + row['name']}")


@data.command("fetch")
def get(
    name: Annotated[str, typer.Argument(help="Name of the data set.")],
    source: Annotated[Path | None, typer.Option("--from", help="A folder that has its files.")] = None,
    url: Annotated[str | None, typer.Option(help="Another address of the same files.")] = None,
) -> None:
    """Fetch a data set, check every file, and put it where training finds it. A broken download is continued."""
    from dpulr.data import catalog
    from dpulr.data.fetch import fetch

    if not catalog.find(name).files:
        print(f"{name} comes with the package; there is nothing to fetch.")
        return
    if not sys.stderr.isatty():
        shown: list[str] = []

        def plain(what: str, done: int, total: int) -> None:
            if what not in shown:
                shown.append(what)
                print(what, file=sys.stderr, flush=True)

        print(fetch(name, plain, source=source, url=url))
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def live(what: str, done: int, total: int) -> None:
            kind = "checking" if what.startswith("checked") else what
            task = tasks.setdefault(kind, bars.add_task(kind, total=None)) if kind not in tasks else tasks[kind]
            bars.update(task, description=what, completed=done, total=total or None)

        place = fetch(name, live, source=source, url=url)
    print(place)
