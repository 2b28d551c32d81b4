"""`dpulr audit`: measure a lower bound on epsilon and say whether the claim holds."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpulr.cli.main import CLAIM_REFUTED
from dpulr.errors import UsageError

if TYPE_CHECKING:
    from dpulr.audit import Verdict

_GAMES = ("one-step", "one-run", "many-runs", "randomness")


def audit(
    mechanism: Annotated[str, typer.Option(help="gaussian, hidden-direction, zeroth-order or paper.")] = "hidden-direction",
    game: Annotated[
        str, typer.Option(help="one-step; one-run: many canaries in one training; many-runs; randomness: what the proofs assume.")
    ] = "one-step",
    canary: Annotated[
        str | None,
        typer.Option(help="crafted, ordinary, mislabelled, large, feature, or a file (.pt, .npz) with x and y. Default: crafted."),
    ] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Noise over the bound on a record. Default: 1.")] = None,
    sample_rate: Annotated[float | None, typer.Option(help="Chance of a record to be in a step.")] = None,
    steps: Annotated[int | None, typer.Option(help="Releases that the attacker sees, or steps of a training run.")] = None,
    per_person: Annotated[int | None, typer.Option(help="one-step: the canary is a person with so many records.")] = None,
    dim: Annotated[int | None, typer.Option(help="crafted: dimensions of the layer.")] = None,
    trials: Annotated[int | None, typer.Option(help="Games with the canary, and as many without; one-run: canaries.")] = None,
    confidence: Annotated[float | None, typer.Option(help="Of the verdict. Default: 0.95.")] = None,
    delta: Annotated[float | None, typer.Option("--delta", "--target-delta", help="Delta. Default: 1e-5.")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeat an audit; by default the operating system's randomness is used.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for verdict.json and a picture.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Attack a mechanism, and say whether its claim holds. Exit code 4: the claim is refuted."""
    import torch

    torch.set_num_threads(1)  # steps are small: more threads only wait for each other
    given = {
        "noise_multiplier": noise_multiplier,
        "sample_rate": sample_rate,
        "steps": steps,
        "dim": dim,
        "per_person": per_person,
        "trials": trials,
        "confidence": confidence,
        "delta": delta,
        "seed": seed,
        "canary": canary,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if game not in _GAMES:
        raise UsageError(f"--game is {game!r}; it must be one of {', '.join(_GAMES)}.")
    if game == "randomness":
        if output is not None or set(options) - {"confidence", "seed"}:
            raise UsageError("--game randomness takes --mechanism, --confidence, --seed and --json only.")
        _randomness(mechanism, options, as_json)
        return
    verdict = _play(mechanism, game, options)
    if output is not None:
        _store(verdict, output)
    print(verdict.to_json() if as_json else f"{verdict}\n\n{verdict.details()}")
    if verdict.broken:
        raise typer.Exit(CLAIM_REFUTED)


def _play(mechanism: str, game: str, options: dict[str, Any]) -> Verdict:
    from dpulr import audit

    if game == "one-step":
        return audit.one_step(mechanism, **options)
    if "per_person" in options:
        raise UsageError("--per-person is for --game one-step.")
    count = options.pop("trials", None)
    if game == "one-run":
        return audit.one_run(mechanism, **options, **({} if count is None else {"canaries": count}))
    if "dim" in options:
        raise UsageError("--dim is for the crafted canary.")
    return audit.many_runs(mechanism, **options, **({} if count is None else {"runs": count}))


def _store(verdict: Verdict, folder: Path) -> None:
    from dpulr.audit import draw
    from dpulr.files import replace_json

    folder.mkdir(parents=True, exist_ok=True)
    replace_json(folder / "verdict.json", verdict.to_dict())
    if find_spec("matplotlib") is None:
        print("no picture: matplotlib is missing; install dpulr[pictures].", file=sys.stderr)
    else:
        draw(verdict, folder / "verdict.png")


def _randomness(mechanism: str, options: dict[str, Any], as_json: bool) -> None:
    from dpulr.audit.randomness import check_engine

    report = check_engine(mechanism, **options)
    print(report.to_json() if as_json else report)
    if report.broken:
        raise typer.Exit(CLAIM_REFUTED)
