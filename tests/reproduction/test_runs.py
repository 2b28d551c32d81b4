"""Runs: what tells them apart, results that resume, and the two loops that are not the package's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpulr.runs.settings import Settings
from reproduction.certified import DPSGD, HIDDEN, certified_run, comparisons, epsilon_of
from reproduction.many_runs import Watcher, run_all
from reproduction.paper_numbers import MODEL_SIZE, TABLE1
from reproduction.paper_runs import method_of, paper_run
from reproduction.results_file import FOLDER_VARIABLE, found, key
from reproduction.run import Run

TINY = paper_run("dp-ulr", 100, 1.0, epochs=1, repeats=2, holdout=59_000)  # ten steps


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


class Watching(Watcher):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def changed(run: Run, **values: Any) -> Run:
    return replace(run, settings=replace(run.settings, **values))


def test_runs_are_told_apart_by_what_they_do_and_not_by_how_it_is_written() -> None:
    run = certified_run("mnist", HIDDEN, 0.8015866155080693, 0)
    same = [
        changed(run, epochs=25),
        changed(run, target_epsilon=0.8015866155080694),
        changed(run, evaluations=3),
        changed(run, mechanism_options={**run.settings.mechanism_options, "subspace": "auto", "groups": None}),
    ]
    for other in same:
        assert key(other.describe()) == key(run.describe())
    different = [
        changed(run, seed=1),
        changed(run, learning_rate=0.3),
        changed(run, mechanism_options={**run.settings.mechanism_options, "groups": 2}),
        changed(run, target_epsilon=0.81),
        replace(run, loop="opacus"),
    ]
    assert len({key(other.describe()) for other in [run, *different]}) == 6


def test_a_description_survives_being_stored() -> None:
    for run in (certified_run("cifar10", DPSGD, 3.0, 1), certified_run("mnist", HIDDEN, 7.0, 0), TINY):
        assert key(json.loads(json.dumps(run.describe()))) == key(run.describe())


def test_defaults_of_the_package_may_change_without_losing_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A description states today's default; what 0.1.0 had is the one that is left out of the key."""
    bare = Run(Settings(mechanism_options={}))
    stated = bare.describe()["mechanism_options"]
    assert key(changed(bare, mechanism_options={"antithetic": stated["antithetic"]}).describe()) == key(bare.describe())
    assert key(changed(bare, mechanism_options={"antithetic": not stated["antithetic"]}).describe()) != key(bare.describe())


@pytest.mark.slow
def test_what_is_known_is_not_run_again(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def train(self: Run, progress: Any) -> dict[str, Any]:
        ran.append(self)
        for share in (0.1, 0.3, 0.4, 0.6, 1.0):
            progress(share)
        return {"run": self.describe(), "test_accuracy": 0.25, "seconds": 2.0}

    monkeypatch.setattr(Run, "train", train)
    first, other = certified_run("mnist", HIDDEN, 1.0, 0), paper_run("sgd", 500)
    watcher = Watching()
    assert len(run_all([first, other], jobs=1, watcher=watcher)) == 2
    assert {file.name for file in results.glob("*.json")} == {"certified.json", "paper.json"}
    assert watcher.lines[:3] == ["2 runs, 0 of them known", f"{first.title}: 25 %", f"{first.title}: 50 %"]
    again = Watching()
    assert [r["run"]["seed"] for r in run_all([first, changed(first, seed=1)], jobs=1, watcher=again)] == [0, 1]
    assert again.lines[0] == "2 runs, 1 of them known"
    assert len(ran) == 3
    assert {"at", "machine", "python"} <= set(found([first])[0])


@pytest.mark.slow  # two new processes
def test_runs_side_by_side(results: Path) -> None:
    sgd = paper_run("dp-sgd", 100, 1.0, epochs=1, holdout=59_000)
    done = run_all([TINY, sgd], jobs=2, watcher=Watching())
    assert [method_of(result["run"]) for result in done] == ["dp-ulr", "dp-sgd"]
    assert {result["steps"] for result in done} == {10}


@pytest.mark.slow
def test_the_papers_loop_has_no_epsilon_and_lowers_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """DP-ULR for ten steps; and plain SGD over 21 epochs of two steps: the rate falls every ten epochs."""
    result = TINY.train(lambda share: None)
    assert (result["epsilon"], result["guarantee"], result["steps"]) == (None, "none", 10)
    assert result["nominal_epsilon"] > 0
    assert len(result["curve"]) == 1
    seen = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, *a: (seen.append(self.param_groups[0]["lr"]), step(self, *a))[1])
    monkeypatch.setattr("dpulr.evaluate", lambda model, data: 0.0)
    paper_run("sgd", 100, epochs=21, holdout=59_800).train(lambda share: None)
    assert seen == pytest.approx([0.1] * 20 + [0.085] * 20 + [0.07225] * 2)


def test_opacus_spends_what_it_is_given() -> None:
    """Two epochs of 1,000 records in batches of 300: seven steps, as the engine would take."""
    run = certified_run("mnist", DPSGD, 3.0, 0, epochs=2, batch_size=300, holdout=59_000)
    shares: list[float] = []
    result = run.train(shares.append)
    assert (result["steps"], len(shares), result["guarantee"]) == (7, 7, "certified")
    assert 2.9 < result["epsilon"] <= 3.0


@pytest.mark.slow
def test_plain_methods_learn() -> None:
    """One epoch of 20,000 records, fixed seed for all but ULR's directions; far above chance and far below what they reach."""
    assert paper_run("sgd", 100, epochs=1, holdout=40_000).train(lambda share: None)["test_accuracy"] > 0.7
    assert paper_run("ulr", 500, epochs=1, holdout=40_000).train(lambda share: None)["test_accuracy"] > 0.5


def test_learning_rates_and_directions_follow_epsilon() -> None:
    hidden = comparisons()["mnist"].methods[HIDDEN]
    assert hidden.learning_rate(0.8) == 0.2
    assert 0.2 < hidden.learning_rate(1.5) < 0.4
    assert [hidden.options_at(epsilon)["repeats"] for epsilon in (0.5, 1.0, 18.6)] == [8, 16, 32]
    assert epsilon_of(500, 2) == pytest.approx(0.917, abs=0.002)


def test_the_papers_numbers_agree_with_each_other() -> None:
    assert MODEL_SIZE[64]["small"] == TABLE1[64][8]
