"""`dpulr plan`: what a setting costs, or which setting meets a budget. It starts without torch."""

from __future__ import annotations

from typing import Annotated

import typer

from dpulr.runs.errors import UsageError


def plan(
    epsilon: Annotated[float | None, typer.Option("--epsilon", "--target-epsilon", help="The budget.")] = None,
    delta: Annotated[float | None, typer.Option("--delta", "--target-delta", help="Delta; 1e-5 unless given.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Noise over the bound on a record.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Expected size of a batch.")] = None,
    epochs: Annotated[float | None, typer.Option(help="How often a record is seen on average.")] = None,
    dataset_size: Annotated[int | None, typer.Option(help="Number of records.")] = None,
    mechanism: Annotated[str, typer.Option(help="gaussian or hidden-direction.")] = "gaussian",
    rejection_threshold: Annotated[str, typer.Option(help="Draw batches below this size again: a number, or auto.")] = "0",
    dims: Annotated[str | None, typer.Option(help="hidden-direction: dimensions of the layers, such as 16,16,16,10.")] = None,
    repeats: Annotated[int | None, typer.Option(help="hidden-direction: directions a record and layer.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Give all of epsilon, noise, batch size, epochs and data set size but one: it is computed. With all of them: delta is."""
    from dpulr.accounting.planning import plan as solve

    layers: dict[str, object] = {}
    if dims is not None:
        layers["dims"] = _numbers(dims)
    if repeats is not None:
        layers["repeats"] = repeats
    found = solve(
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=noise_multiplier,
        batch_size=batch_size,
        epochs=epochs,
        dataset_size=dataset_size,
        mechanism=mechanism,
        rejection_threshold=_threshold(rejection_threshold),
        **layers,
    )
    print(found.to_json() if as_json else found.table())


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as problem:
        raise UsageError(f"--dims takes whole numbers, such as 16,16,16,10, not {text!r}.") from problem


def _threshold(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError as problem:
        raise UsageError(f"--rejection-threshold is {text!r}; it must be a whole number or auto.") from problem
