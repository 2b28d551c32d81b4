"""`dpulr tune`: choose settings on private data, with an epsilon that covers the choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dpulr.cli.options import AsJson, Sets, new_folder, takes_settings
from dpulr.errors import UsageError
from dpulr.runs.config_files import read_config, split_invocation
from dpulr.runs.settings import Settings
from dpulr.runs.values import pairs_of


@takes_settings
def tune(
    options: dict[str, Any],
    space: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,C", help="Values to choose from: learning_rate=0.1,0.2,0.4. Once for each setting."),
    ] = None,
    runs: Annotated[float, typer.Option(help="How many runs there are on average. Their number is random, and secret.")] = 10.0,
    eta: Annotated[float, typer.Option(help="Shape of that number: 0 logarithmic, 1 geometric. Smaller is cheaper.")] = 0.0,
    score_on: Annotated[
        str, typer.Option(help="holdout: noisy, on private records (--holdout of them); test: on the test part, which is public.")
    ] = "holdout",
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side, each in a process of its own.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the search; by default a new one under runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with an unfinished search.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say what the search would cost, and stop.")] = False,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Train about so many times with settings from a space, and release the best. --epsilon is the budget of all of it."""
    if resume is not None:
        if options or space or plan or out is not None:
            raise UsageError("--resume goes on with a search as it was begun: give no settings with it.")
        from dpulr.runs import tuning

        _show(tuning.finish(resume, jobs=jobs, say=_say(as_json)), resume, as_json)
        return
    values, _ = split_invocation({} if config is None else read_config(config))
    base = Settings.build(values, options, sets or ())
    from dpulr.runs import tuning
    from dpulr.runs.space import Search, plan_search

    search = Search(base, _space(space or ()), runs, eta, score_on)  # type: ignore[arg-type]
    if plan:
        for line in tuning.describe(plan_search(search)):
            print(line)
        return
    folder = out or new_folder("search")
    tuning.begin(search, folder, _say(as_json))
    _show(tuning.finish(folder, jobs=jobs, say=_say(as_json)), folder, as_json)


def _space(texts: list[str] | tuple[str, ...]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, sign, listed = text.partition("=")
        words = [word for word in listed.split(",") if word.strip()]
        if not sign or not name.strip() or not words:
            raise UsageError(f"--space takes key=a,b,c, not {text!r}.")
        found[name.strip()] = [value for _, value in pairs_of(f"{name}={word}" for word in words)]
    if not found:
        raise UsageError("give --space at least once: the values of a setting to choose from, such as learning_rate=0.1,0.2,0.4.")
    return found


def _say(as_json: bool) -> Any:
    return (lambda text: print(json.dumps({"note": text}), flush=True)) if as_json else (lambda text: print(text, flush=True))


def _show(result: dict[str, Any], folder: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    chosen = ", ".join(f"{name}={value}" for name, value in result["chosen"].items())
    accuracy = f"; on the test part {100 * result['test_accuracy']:.2f} %" if "test_accuracy" in result else ""
    print(f"chosen: {chosen}; score {100 * result['score']:.2f} %{accuracy}")
    print(result["statement"])
    print(f"{folder}: model.safetensors, config.json and result.json")
