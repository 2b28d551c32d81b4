"""`dpulr audit`: measure a lower bound on epsilon and say whether the claim holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpulr.runs.errors import UsageError

if TYPE_CHECKING:
    from dpulr.audit import Verdict

BROKEN = 4
_GAMES = ("one-step", "one-run", "many-runs", "randomness")


def audit(
    mechanism: Annotated[
        str, typer.Option(help="gaussian, hidden-direction, zeroth-order, paper, or opacus.")
    ] = "hidden-direction",
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
    dim: Annotated[int | None, typer.Option(help="crafted: dimensions of the layer.")] = None,
    trials: Annotated[int | None, typer.Option(help="Games with the canary, and as many without; one-run: canaries.")] = None,
    confidence: Annotated[float | None, typer.Option(help="Of the verdict. Default: 0.95.")] = None,
    delta: Annotated[float | None, typer.Option(help="Delta. Default: 1e-5.")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeat an audit; by default the operating system's randomness is used.")] = None,
    bug: Annotated[str | None, typer.Option(help="Audit a mechanism with this bug in it, such as noise-halved, instead.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for verdict.json and a picture.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="All settings of docs/audit.md, into OUTPUT/audit.json (half an hour).")
    ] = False,
) -> None:
    """Attack a mechanism, and say whether its claim holds. Exit code 4: the claim is refuted."""
    import torch

    torch.set_num_threads(1)  # steps are small: more threads only wait for each other
    given = {
        "noise_multiplier": noise_multiplier,
        "sample_rate": sample_rate,
        "steps": steps,
        "dim": dim,
        "trials": trials,
        "confidence": confidence,
        "delta": delta,
        "seed": seed,
        "canary": canary,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if full:
        _full(output or Path("audit"))
        return
    if game not in _GAMES:
        raise UsageError(f"--game is {game!r}; it must be one of {', '.join(_GAMES)}.")
    if game == "randomness":
        if bug is not None or output is not None or set(options) - {"confidence", "seed"}:
            raise UsageError("--game randomness takes --mechanism, --confidence, --seed and --json only.")
        _randomness(mechanism, options, as_json)
        return
    if bug is not None and game != "one-step":
        raise UsageError("--bug has a game of its own: leave out --game.")
    verdict = _bug(bug, options) if bug is not None else _play(mechanism, game, options)
    if output is not None:
        from dpulr.audit import draw
        from dpulr.runs.files import replace_json

        output.mkdir(parents=True, exist_ok=True)
        replace_json(output / "verdict.json", verdict.to_dict())
        draw(verdict, output / "verdict.png")
    print(verdict.to_json() if as_json else f"{verdict}\n\n{verdict.details()}")
    if verdict.broken:
        raise typer.Exit(BROKEN)


def _play(mechanism: str, game: str, options: dict[str, Any]) -> Verdict:
    from dpulr import audit

    if game == "one-step":
        return audit.one_step(mechanism, **options)
    if mechanism == "opacus":
        raise UsageError("Opacus is audited in the one-step game only.")
    count = options.pop("trials", None)
    if game == "one-run":
        return audit.one_run(mechanism, **options, **({} if count is None else {"canaries": count}))
    if "dim" in options:
        raise UsageError("--dim is for the crafted canary.")
    return audit.many_runs(mechanism, **options, **({} if count is None else {"runs": count}))


def _bug(bug: str, options: dict[str, Any]) -> Verdict:
    from reproduction.planted_bugs import BUGS

    if bug not in BUGS:
        raise UsageError(f"--bug is {bug!r}; it must be one of {', '.join(BUGS)}.")
    unused = set(options) - {"trials", "confidence", "delta", "seed"}
    if unused:
        raise UsageError(f"--bug has a setting of its own: leave out --{unused.pop().replace('_', '-')}.")
    return BUGS[bug].audit(**options)


def _randomness(mechanism: str, options: dict[str, Any], as_json: bool) -> None:
    from dpulr.audit.randomness import check_engine

    report = check_engine(mechanism, **options)
    print(report.to_json() if as_json else report)
    if report.broken:
        raise typer.Exit(BROKEN)


def _full(folder: Path) -> None:
    from reproduction import audit_sweep as sweep

    found = sweep.run(folder / "audit.json")
    wrong = [key for key, row in found.items() if row["broken"] != (row["group"] == "bugs") and row["group"] != "paper"]
    print("\n".join(["", *(f"UNEXPECTED: {key}" for key in wrong)]) if wrong else "\nall as expected")
    if wrong:
        raise typer.Exit(BROKEN)
