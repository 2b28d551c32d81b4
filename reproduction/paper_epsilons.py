"""The paper's 15 MNIST settings: its nominal epsilon, the conditions violated, and certified prices at the same noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpulr.accounting.shortcuts import gaussian_epsilon, hidden_direction_epsilon
from dpulr.paper.nominal import paper_nominal
from reproduction.pages import table

DATASET_SIZE, EPOCHS, DELTA = 60_000, 25, 1e-5
DIMS = (128, 64, 32, 10)
BATCHES = ((64, 938), (200, 300), (500, 120))  # batch size, batches per epoch
NOISES = (0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True)
class PaperSetting:
    """One row. `joint`: clipped jointly to C; `by_layer`: four layers clipped to C each, as the paper does."""

    batch_size: int
    target_std: float
    nominal: float
    violated: tuple[str, ...]
    joint: float
    by_layer: float
    hidden: float


def paper_settings() -> list[PaperSetting]:
    """All 15 rows. Certified values are for Poisson sampling without rejection."""
    rows = []
    for batch, per_epoch in BATCHES:
        rate, steps = 1 / per_epoch, EPOCHS * per_epoch
        sampling: dict[str, Any] = {"sample_rate": rate, "steps": steps, "delta": DELTA}
        for noise in NOISES:
            threshold = int(rate * DATASET_SIZE + 1e-9)
            paper: dict[str, Any] = {
                "target_std": noise,
                "rejection_threshold": threshold,
                "dataset_size": DATASET_SIZE,
                **sampling,
            }
            result = paper_nominal(**paper, enforce_alpha=True)
            if result.violated:
                result = paper_nominal(**paper)  # the bare formula, with its best alpha
            rows.append(
                PaperSetting(
                    batch,
                    noise,
                    result.epsilon,
                    result.violated,
                    gaussian_epsilon(noise_multiplier=noise, **sampling),
                    gaussian_epsilon(noise_multiplier=noise / len(DIMS) ** 0.5, **sampling),
                    hidden_direction_epsilon(noise_multiplier=noise, dims=DIMS, **sampling),
                )
            )
    return rows


def markdown() -> str:
    """The rows as a table."""
    heads = ["batch", "sigma0", "paper's nominal epsilon", "conditions violated", "gaussian, clipped jointly"]
    rows = [
        [f"{row.batch_size}", f"{row.target_std:g}", f"{row.nominal:.3f}", "; ".join(row.violated) or "none"]
        + [f"{value:.3f}" for value in (row.joint, row.by_layer, row.hidden)]
        for row in paper_settings()
    ]
    return table([*heads, "gaussian, 4 layers clipped one by one", "hidden-direction, 4 layers"], rows)
