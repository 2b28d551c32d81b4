"""`dpulr reproduce`: runs side by side, results that resume, the paper's numbers, and what a person sees."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reproduction.paper_numbers import MODEL_SIZE, TABLE1
from reproduction.paper_runs import PaperRun, run

from dpulr.accounting import gaussian_epsilon
from dpulr.cli.main import main
from dpulr.runs import training
from dpulr.runs.training import Recipe
from reproduction import many_runs as reproduction
from reproduction import paper_runs
from reproduction import paper_tables as tables

TINY = PaperRun("dp-ulr", 100, 1.0, epochs=1, repeats=2, holdout=59_000)  # ten steps


class Watching:
    def __init__(self) -> None:
        self.counts: tuple[int, int] = (0, 0)
        self.moves: list[tuple[str, float]] = []
        self.results: list[dict[str, Any]] = []

    def began(self, total: int, known: int) -> None:
        self.counts = (total, known)

    def moved(self, title: str, share: float) -> None:
        self.moves.append((title, share))

    def done(self, result: dict[str, Any]) -> None:
        self.results.append(result)


@pytest.mark.slow  # two new processes
def test_runs_side_by_side_are_kept_and_not_repeated(tmp_path: Path) -> None:
    file, settings = tmp_path / "results.json", [TINY, replace(TINY, method="dp-sgd"), replace(TINY, method="sgd", target_std=0.0)]
    first = Watching()
    reproduction.run_all(settings[:2], file, jobs=2, watcher=first)
    assert first.counts == (2, 0)
    assert {title.split()[0] for title, _ in first.moves} == {"dp-ulr", "dp-sgd"}
    stored = {result["recipe"]["method"]: result for result in json.loads(file.read_text())}
    second = Watching()
    results = reproduction.run_all(settings, file, jobs=2, watcher=second)
    assert second.counts == (3, 2)
    assert [result["recipe"]["method"] for result in second.results] == ["sgd"]
    assert [result["recipe"]["method"] for result in results] == ["dp-ulr", "dp-sgd", "sgd"]
    assert results[0] == stored["dp-ulr"]
    for result in results[:2]:
        assert (result["epsilon"], result["guarantee"]) == (None, "none")
        assert result["nominal_epsilon"] > 0
        assert result["steps"] == 10
        assert {"version", "torch", "python", "machine", "at", "seconds"} <= set(result)
    assert "opacus" in results[1]
    assert results[2]["nominal_epsilon"] is None


def test_the_learning_rate_falls_every_ten_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, *a: (seen.append(self.param_groups[0]["lr"]), step(self, *a))[1])
    monkeypatch.setattr("dpulr.evaluate", lambda model, data: 0.0)
    run(PaperRun("sgd", 100, epochs=21, holdout=59_800))  # two steps an epoch
    assert seen == pytest.approx([0.1] * 20 + [0.085] * 20 + [0.07225] * 2)


@pytest.mark.slow
def test_plain_methods_learn() -> None:
    """One epoch of 20,000 records, fixed seed for all but ULR's directions; far above chance and far below what they reach."""
    assert run(PaperRun("sgd", 100, epochs=1, holdout=40_000))["test_accuracy"] > 0.7
    assert run(PaperRun("ulr", 500, epochs=1, holdout=40_000))["test_accuracy"] > 0.5


def test_the_papers_numbers_agree_with_each_other() -> None:
    assert MODEL_SIZE[64]["small"] == TABLE1[64][8]


def test_settings_are_chosen_by_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--show runs nothing, so every cell of ours is empty."""
    arguments = ["reproduce", "table1", "--show", "--results", str(tmp_path), "--settings", "500:4", "--settings", "64"]
    assert main(arguments) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[:2] for row in rows] == [["| 500", "4"], *[["| 64", s] for s in ("0.5", "1", "2", "4", "8")]]
    assert " | 86.56 / 87.63 | - | 87.66 / 87.97 | - | " in rows[0]
    assert main(["reproduce", "model-size", "--show", "--settings", "7:small"]) == 2
    assert "there is no setting '7:small'; there are 64:small" in capsys.readouterr().err


def test_a_command_runs_prints_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cifar` from end to end with runs replaced by made-up results: a table, a picture, nothing run twice."""
    ran = []

    def made_up(setting: PaperRun, progress: Any = None) -> dict[str, Any]:
        ran.append(setting.method)
        for share in (0.1, 0.3, 0.4, 0.6, 1.0):
            progress(share)
        point = {"epoch": 1, "train_accuracy": 0.3, "test_accuracy": 0.25}
        about = {"test_accuracy": 0.25, "curve": [point], "nominal_epsilon": 1.0, "seconds": 2.0}
        return {"recipe": setting.describe(), **about}

    monkeypatch.setattr(paper_runs, "run", made_up)
    folders = ["--results", str(tmp_path / "r"), "--images", str(tmp_path / "i")]
    seen = ""
    for _ in range(2):
        assert main(["reproduce", "cifar", "--settings", "dp-sgd,50:5", "--epochs", "1", "--jobs", "1", *folders]) == 0
        printed = capsys.readouterr()
        seen += printed.err
        assert f"| dp-ulr | 1000 | 5 | {tables.CIFAR_REPEATS} | 0 | 30.00 / 25.00 (1) | 25.0 | 1.000 | 2 |" in printed.out
    assert ran == ["dp-sgd", "dp-ulr"]
    assert [line.split(": ")[1] for line in seen.splitlines() if line.startswith("dp-sgd")][:2] == ["25 %", "50 %"]
    assert "2 runs, 2 of them known" in printed.err
    assert (tmp_path / "i/paper-cifar.png").stat().st_size > 10_000


def test_table1_runs_the_certified_methods_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over one epoch, at what the Gaussian mechanism costs over one epoch."""
    ran = []

    def made_up(setting: PaperRun | Recipe, progress: Any = None) -> dict[str, Any]:
        ran.append(setting)
        point = {"epoch": 1, "train_accuracy": 0.3, "test_accuracy": 0.25}
        return {"recipe": setting.describe(), "test_accuracy": 0.25, "curve": [point], "nominal_epsilon": 1.0, "seconds": 2.0}

    monkeypatch.setattr(paper_runs, "run", made_up)
    monkeypatch.setattr(training, "run", made_up)
    command = ["reproduce", "table1", "--settings", "500:1", "--epochs", "1", "--jobs", "1", "--results", str(tmp_path)]
    assert main(command) == main(command) == 0
    assert [type(setting) for setting in ran] == [PaperRun, PaperRun, Recipe, Recipe]
    epsilon = gaussian_epsilon(noise_multiplier=1.0, sample_rate=1 / 120, steps=120, delta=1e-5)
    assert [(setting.epochs, setting.target_epsilon) for setting in ran[2:]] == [(1, pytest.approx(epsilon))] * 2
    ours = f"30.00 / 25.00 (1) | 87.56 / 87.98 | 30.00 / 25.00 (1) | {epsilon:.3f} | 25.00 (1) | 25.00 (1) |"
    assert ours in capsys.readouterr().out
