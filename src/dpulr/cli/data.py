"""`dpulr data`: list, fetch, check, and draft a schema."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dpulr.cli.options import AsJson

data = typer.Typer(
    help="List the data sets, fetch and check them; draft the schema of a table.", no_args_is_help=True, rich_markup_mode=None
)


@data.command("list")
def show(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """List the data sets that are known by name, and where they are."""
    from dpulr.data import catalog
    from dpulr.errors import DataError

    rows = []
    for entry in catalog.ENTRIES.values():
        try:
            place = str(catalog.place(entry)) if entry.files else "in the package"
        except DataError:
            place = ""
        rows.append({"name": entry.name, "about": entry.about, "place": place})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['name']:14} {row['about']}\n{'':14} {row['place'] or 'not here; dpulr data fetch ' + row['name']}")


@data.command("check")
def check(
    name: Annotated[str, typer.Argument(help="Name of the data set, or package.module:function returning (train, test).")],
    model: Annotated[str | None, typer.Option(help="A model, whose outputs the labels are compared with.")] = None,
    unit: Annotated[str | None, typer.Option(help="The column that names the person, or package.module:function.")] = None,
    schema: Annotated[str | None, typer.Option(help="csv: and parquet: the schema.")] = None,
    label: Annotated[str | None, typer.Option(help="csv: and parquet: the column to predict.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Read a data set, compare its files with their checksums, and tell what is wrong with which record.

    UNPROTECTED: what it prints comes from the records themselves. It is for the owner of the data.
    """
    from dpulr.data import checking
    from dpulr.runs.loading import load_data, make_model, make_unit
    from dpulr.runs.settings import Settings

    settings = Settings(dataset=name, model=model or "auto", schema=schema, label=label, unit=unit)
    parts: dict[str, dict[str, Any]] = {}
    for part, dataset in zip(("train", "test"), load_data(settings), strict=True):
        if dataset is None:
            continue
        records = checking.open_records(dataset)
        classes = None if model is None else checking.outputs_of(make_model(settings), records)
        findings = checking.check(dataset, records.schema, classes, make_unit(settings) if part == "train" else None)
        parts[part] = {"records": records.size, "schema": str(records.schema), "findings": findings}
    if as_json:
        for about in parts.values():
            about["findings"] = [asdict(finding) for finding in about["findings"]]
        print(json.dumps({"unprotected": True, "dataset": name, **parts}, indent=1))
        return
    print("UNPROTECTED: this comes from the records themselves and is covered by no guarantee. Do not publish it.")
    for part, about in parts.items():
        print(f"UNPROTECTED {part}: {about['records']:,} records, {about['schema']}")
        for finding in about["findings"] or ["nothing wrong was found."]:
            print(f"UNPROTECTED {part}: {finding}")


@data.command("schema")
def schema(
    file: Annotated[Path, typer.Argument(help="A CSV or Parquet file.")],
    label: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    out: Annotated[Path | None, typer.Option(help="The TOML file to write; by default it is printed.")] = None,
) -> None:
    """Draft what 'dpulr train --schema' needs: the columns of a table, with their ranges and categories.

    UNPROTECTED: the draft comes from the records themselves. Put in what everybody may know; until then runs have no guarantee.
    """
    from dpulr.data.tables import draft
    from dpulr.errors import UsageError

    text = draft(file, label)
    if out is None:
        print(text, end="")
        return
    if out.exists():
        raise UsageError(f"{out} exists.")
    out.write_text(text, encoding="utf-8")
    print(f"UNPROTECTED: {out} holds values from the records. Replace them by public ones, and remove 'from_data = true'.")


@data.command("fetch")
def get(
    name: Annotated[str, typer.Argument(help="Name of the data set.")],
    source: Annotated[Path | None, typer.Option("--from", help="A folder that has its files.")] = None,
    url: Annotated[str | None, typer.Option(help="Another address of the same files.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a data set, check every file, and put it where training finds it. A broken download is continued."""
    from dpulr.data import catalog

    if not catalog.find(name).files:
        print(f"{name} comes with the package; there is nothing to fetch.")
        return
    from dpulr.cli.progress import make_view
    from dpulr.data.fetch import fetch

    with make_view(as_json=as_json) as view:
        place = fetch(name, view.progress, source=source, url=url)
        view.end({"place": str(place)}, str(place))
