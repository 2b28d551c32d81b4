"""`python -m reproduction`: what it lists, what it prints, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpulr.accounting import gaussian_epsilon
from reproduction import options, studies
from reproduction.__main__ import main
from reproduction.results_file import FOLDER_VARIABLE
from reproduction.run import Run


@pytest.fixture
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No results."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, nothing: Path) -> list[Run]:
    """Runs that are asked for; each gets the same synthetic result."""
    ran: list[Run] = []

    def train(self: Run, progress: Any) -> dict[str, Any]:
        ran.append(self)
        point = {"epoch": 1, "train_accuracy": 0.3, "test_accuracy": 0.25, "parameter_norm": 1.0}
        numbers = {"test_accuracy": 0.25, "best_accuracy": 0.25, "curve": [point], "nominal_epsilon": 1.0, "seconds": 2.0}
        return {"run": self.describe(), "epsilon": 1.0, **numbers}

    monkeypatch.setattr(Run, "train", train)
    monkeypatch.setattr("gc.collect", lambda: 0)  # after each run; that takes long in a process of so many tests
    return ran


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")][2:]


def test_all_studies_are_listed_and_nothing_of_the_tables_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = {row.split(" | ")[0].removeprefix("| "): row.split(" | ") for row in rows(capsys.readouterr().out)}
    assert set(listed) == {*studies.studies(), *studies.OTHERS}
    for name in ("table1", "figure-dynamics", "results", "gaussian", "options"):
        assert listed[name][4:6] == ["0", "0.0"]
    assert float(listed["table1"][3]) > 1  # hours, if all of it had to be run again


def test_settings_are_chosen_by_label(nothing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--show runs nothing, so every cell of ours is empty."""
    assert main(["table1", "--show", "--settings", "500:4", "64"]) == 0
    shown = rows(capsys.readouterr().out)
    assert [row.split(" | ")[:2] for row in shown] == [["| 500", "4"], *[["| 64", s] for s in ("0.5", "1", "2", "4", "8")]]
    assert " | 86.56 / 87.63 | - | 87.66 / 87.97 | - | " in shown[0]
    for wrong in (["model-size", "--settings", "7:small"], ["baselines", "--repeats", "3"], ["table1", "--seeds", "0"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
    assert "there is no setting '7:small'; there are 64:small" in capsys.readouterr().err


def test_a_study_runs_prints_and_goes_on(trained: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["cifar", "--settings", "dp-sgd,50:5", "--epochs", "1", "--jobs", "1"]) == 0
        printed = capsys.readouterr()
        assert "| dp-ulr | 1000 | 5 | 2 | 0 | 30.00 / 25.00 (1) | 25.0 | 1.000 | 2 |" in printed.out
    assert [run.settings.mechanism for run in trained] == ["opacus", "paper"]
    assert "2 runs, 2 of them known" in printed.err


def test_table1_runs_the_certified_methods_too(trained: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    """Over one epoch, at what the Gaussian mechanism costs over one epoch. A change to the paper's runs is for those alone."""
    assert main(["table1", "--settings", "500:1", "--epochs", "1", "--jobs", "1"]) == 0
    assert [run.loop for run in trained] == ["paper", "paper", "dpulr", "opacus"]
    epsilon = gaussian_epsilon(noise_multiplier=1.0, sample_rate=1 / 120, steps=120, delta=1e-5)
    assert [(run.settings.epochs, run.settings.target_epsilon) for run in trained[2:]] == [(1, pytest.approx(epsilon))] * 2
    ours = f"30.00 / 25.00 (1) | 87.56 / 87.98 | 30.00 / 25.00 (1) | {epsilon:.3f} | 25.00 (1) | 25.00 (1) |"
    assert ours in capsys.readouterr().out
    assert main(["table1", "--settings", "500:1", "--epochs", "1", "--jobs", "1", "--holdout", "10000", "--sigma", "2"]) == 0
    assert [(run.loop, run.file) for run in trained[4:]] == [("paper", "held-out.json")] * 2
    assert trained[4].settings.mechanism_options["sigma"] == 2


def test_options_repeat_only_the_best_rate(trained: list[Run]) -> None:
    assert main(["options", "--settings", "momentum", "--seeds", "2", "--jobs", "1"]) == 0
    rates = {(run.settings.momentum, run.settings.seed): [] for run in trained}
    for run in trained:
        rates[run.settings.momentum, run.settings.seed].append(run.settings.learning_rate)
    assert rates == {(0.0, 0): [4.0, 8.0, 16.0], (0.9, 0): [0.4, 0.8, 1.6], (0.0, 1): [4.0], (0.9, 1): [0.4]}


def test_every_option_makes_runs() -> None:
    for members in options.variants().values():
        for variant in members.values():
            assert [run.settings.holdout for run in options.runs(variant, 0)] == [10_000] * 3
