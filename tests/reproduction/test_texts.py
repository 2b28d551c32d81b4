"""The study of private fine-tuning: which runs it makes, what it prints, and its three training loops on a small problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpulr.data import ArrayDataset
from dpulr.runs.settings import Settings
from reproduction import texts
from reproduction.__main__ import main
from reproduction.results_file import FOLDER_VARIABLE
from reproduction.run import Run


def test_rates_are_chosen_on_held_out_records_and_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Run] = []

    def train(self: Run, progress: Any) -> dict[str, Any]:
        ran.append(self)
        return {"run": self.describe(), "test_accuracy": 0.9 if self.settings.learning_rate == 1 else 0.5, "seconds": 1.0}

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(Run, "train", train)
    monkeypatch.setattr("gc.collect", lambda: 0)
    chosen = ["tomatoes:lora:gradient", "tomatoes:lora:plain"]
    assert main(["texts", "--settings", *chosen, "--jobs", "1"]) == 0
    assert [(run.settings.holdout, run.settings.target_epsilon, run.settings.learning_rate) for run in ran] == [
        *[(1_000, 3.0, rate) for rate in (0.25, 1.0, 4.0)],
        (0, 3.0, 1.0),
        *[(1_000, None, rate) for rate in (0.05, 0.2)],
        (0, None, 0.05),
        (0, 1.0, 1.0),
        (0, 8.0, 1.0),
    ]
    printed = capsys.readouterr().out
    assert "| tomatoes | LoRA in the last two layers | gradient | 90.00 (1) | 90.00 (1) | 90.00 (1) | - | 1 |" in printed
    assert "| tomatoes | LoRA in the last two layers | not private | - | - | - | 50.00 (1) | 0.05 |" in printed
    assert "Not run yet" not in printed
    assert (
        "Not run yet: tomatoes, head: gradient; tomatoes, LoRA in the last two layers: dpzero, hidden-direction" in texts.markdown()
    )


@pytest.mark.parametrize("loop", ["dpulr", "plain", "opacus"])
def test_the_loops_learn(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two inputs, of which only the first says something; the last 100 records are held out, and have wrong labels."""
    rng = np.random.default_rng(0)
    first = rng.normal(size=(1_000, 3)).astype(np.float32)
    labels = (first[:, 0] > 0).astype(np.int64)
    labels[-100:] = 1 - labels[-100:]
    data = ArrayDataset((first, rng.normal(size=(1_000, 2)).astype(np.float32)), labels)
    train = torch.utils.data.Subset(data, range(900))  # type: ignore[arg-type]
    monkeypatch.setattr("dpulr.runs.loading.load_data", lambda settings: (train, train))
    monkeypatch.setattr("dpulr.runs.loading.make_model", lambda settings: _Small())
    if loop == "opacus":
        pytest.importorskip("opacus")
    epsilon = None if loop == "plain" else 8.0
    settings = Settings("mnist", mechanism="gradient", batch_size=100, epochs=4, target_epsilon=epsilon, learning_rate=2.0)
    numbers = texts.TextRun(settings, loop).numbers(lambda share: None)
    assert numbers["test_accuracy"] > 0.9
    assert numbers["steps"] == numbers["passes"] == 36


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(first) + 0 * second
        return out
