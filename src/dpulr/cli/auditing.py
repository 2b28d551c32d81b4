"""`dpulr audit`: measure a lower bound on epsilon and say whether the claim holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpulr.runs.errors import UsageError

BROKEN = 4


def audit(
    mechanism: Annotated[str, typer.Option(help="A mechanism of dpulr, or opacus as a control.")] = "hidden-direction",
    canary: Annotated[
        str, typer.Option(help="crafted, ordinary, mislabelled, large, feature, or a file (.pt, .npz) with x and y.")
    ] = "crafted",
    noise_multiplier: Annotated[float, typer.Option(help="Noise over the bound on a record.")] = 1.0,
    sample_rate: Annotated[float, typer.Option(help="Chance of a record to be in a step.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Releases that the attacker sees.")] = 1,
    dim: Annotated[int | None, typer.Option(help="crafted: dimensions of the layer.")] = None,
    trials: Annotated[int | None, typer.Option(help="Games with the canary, and as many without.")] = None,
    confidence: Annotated[float, typer.Option(help="Of the verdict.")] = 0.95,
    delta: Annotated[float, typer.Option(help="Delta.")] = 1e-5,
    seed: Annotated[int | None, typer.Option(help="Repeat an audit; by default the operating system's randomness is used.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for verdict.json and a picture.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Attack a mechanism, and say whether its claim holds. Exit code 4: the claim is refuted."""
    import torch

    from dpulr.audit import draw, one_step
    from dpulr.runs.files import replace_json

    for name, value in (("noise-multiplier", noise_multiplier), ("dim", dim), ("steps", steps)):
        if value is not None and not value > 0:
            raise UsageError(f"--{name} is {value}; it must be positive.")
    torch.set_num_threads(1)  # steps are small: more threads only wait for each other
    verdict = one_step(
        mechanism,
        canary,
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        steps=steps,
        dim=dim,
        trials=trials,
        delta=delta,
        confidence=confidence,
        seed=seed,
    )
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        replace_json(output / "verdict.json", verdict.to_dict())
        draw(verdict, output / "verdict.png")
    print(verdict.to_json() if as_json else f"{verdict}\n\n{verdict.details()}")
    if verdict.broken:
        raise typer.Exit(BROKEN)
