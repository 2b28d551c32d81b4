"""A private search from end to end: what it charges, what it releases, what it forgets; crashes; bad input."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import dpulr
from dpulr import accounting
from dpulr.errors import BudgetError, PrivacyRefusal, RunError, UsageError
from dpulr.files import read_json, replace_json
from dpulr.mechanisms import known
from dpulr.runs import tuning
from dpulr.runs.folder import SEARCH
from dpulr.runs.settings import Settings
from dpulr.runs.space import Search, plan_search
from dpulr.runs.training import Training
from reproduction import planted_bugs

SMALL: dict[str, Any] = {
    "dataset": "tests.runs.test_tuning:data",
    "model": "tests.support.small_job:model",
    "mechanism": "gradient",
    "repeats": None,
    "batch_size": 60,
    "steps": 12,
    "target_epsilon": 4.0,
    "target_delta": 1e-4,
    "holdout": 300,
}
SPACE = {"learning_rate": [0.001, 0.3], "batch_size": [60, 120]}


def data() -> tuple[Any, Any]:
    import torch
    from torch.utils.data import TensorDataset

    from tests.support import small_job

    train, test = small_job.data()
    inputs, labels = train.tensors
    return TensorDataset(inputs.repeat(5, 1) + 0.1 * torch.randn(1000, 6), labels.repeat(5)), test


def searched(**changes: Any) -> Search:
    return Search(Settings.build(options={**SMALL, **changes}), SPACE, runs=4)


@pytest.fixture(scope="module")
def plan() -> Any:
    return plan_search(searched())


def test_the_budget_is_that_of_the_whole_search(plan: Any) -> None:
    assert plan.cost.run < plan.cost.training <= plan.cost.total <= 4.0
    assert plan.cost.total > 3.8  # and it is used
    assert plan.cost.scoring <= plan.cost.training
    assert plan.noise[0] == plan.noise[2] != plan.noise[1]  # the learning rate costs nothing, the batch size does
    assert (plan.training_records, plan.held_out_records) == (700, 300)


def test_a_search_releases_the_best_run_and_forgets_the_others(tmp_path: Path, plan: Any, capfd: Any) -> None:
    folder, said = tmp_path / "search", list[str]()
    tuning.begin(plan.search, folder, said.append)
    assert "One run: epsilon" in said[0]
    assert "Total: epsilon" in said[0]
    private = folder / tuning.PRIVATE
    assert private.name.startswith("PRIVATE")
    assert private.stat().st_mode & 0o077 == 0
    replace_json(private / tuning.DRAWN, {"private": True, "runs": 4, "choices": [0, 2, 3, 0]})
    tuning.one_run(str(folder), 1)
    finished = (private / "run-00001.safetensors").read_bytes()
    tuning.one_run(str(folder), 2)
    said.clear()
    result = tuning.finish(folder, say=said.append)
    assert finished  # what was there was not made again: it is the best, and its score is the one that came out
    assert len(said) == 1
    assert "nothing is shown before the end" in said[0]
    assert capfd.readouterr() == ("", "")
    assert result["chosen"]["learning_rate"] == 0.3  # the other one learns nothing: 33 % of 300, with a deviation of some records
    assert result["epsilon"] == pytest.approx(plan.cost.total)
    assert result["run_epsilon"] == pytest.approx(plan.cost.run)
    assert 0.6 < result["score"] < 1.1
    assert result["test_accuracy"] > 0.6
    assert "or held out to score runs, while the other of the two parts stays as it is" in result["statement"]
    assert not private.exists()
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        "config.json",
        "model.safetensors",
        "result.json",
        "search.json",
    ]
    assert tuning.finish(folder) == result
    assert dpulr.runs.load(folder).score().accuracy == pytest.approx(result["test_accuracy"])


def test_an_interrupted_search_goes_on_with_what_was_drawn(tmp_path: Path, plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "search"
    tuning.begin(plan.search, folder)
    replace_json(folder / tuning.PRIVATE / tuning.DRAWN, {"private": True, "runs": 3, "choices": [2, 2, 1]})
    done: list[int] = []
    real = tuning.one_run

    def dying(place: str, run: int) -> None:
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(run)
        real(place, run)

    monkeypatch.setattr(tuning, "one_run", dying)
    with pytest.raises(KeyboardInterrupt):
        tuning.finish(folder)
    assert not (folder / "result.json").exists()
    kept = (folder / tuning.PRIVATE / "run-00000.safetensors").read_bytes()
    again: list[int] = []
    monkeypatch.setattr(tuning, "one_run", lambda place, run: (again.append(run), real(place, run)))
    monkeypatch.setattr(tuning, "_release", lambda place, runs: {"kept": tuning._file(place, 0).read_bytes() == kept, "runs": runs})
    assert tuning.finish(folder) == {"kept": True, "runs": 3}
    assert again == [1, 2]


def test_what_was_drawn_can_t_be_drawn_again(tmp_path: Path, plan: Any) -> None:
    folder = tmp_path / "search"
    tuning.begin(plan.search, folder)
    drawn = read_json(folder / tuning.PRIVATE / tuning.DRAWN)
    assert len(drawn["choices"]) == drawn["runs"] >= 1
    (folder / tuning.PRIVATE / tuning.DRAWN).unlink()
    with pytest.raises(RunError, match=r"can.t be drawn again"):
        tuning.finish(folder)
    with pytest.raises(UsageError, match="not empty"):
        tuning.begin(plan.search, folder)


def test_a_run_that_would_release_something_else_is_refused(tmp_path: Path, plan: Any) -> None:
    folder = tmp_path / "search"
    tuning.begin(plan.search, folder)
    about = read_json(folder / SEARCH)
    less = [{**one, "noise_multiplier": one["noise_multiplier"] / 2} for one in about["runs_with"]]
    replace_json(folder / SEARCH, {**about, "runs_with": less})
    with pytest.raises(PrivacyRefusal, match="something else than was charged"):
        tuning.one_run(str(folder), 0)


def test_what_is_left_to_auto_is_settled_before_the_first_run(tmp_path: Path) -> None:
    base = Settings.build(options={**SMALL, "batch_size": "auto"})
    begun = tuning.begin(Search(base, {"learning_rate": ["auto", 0.3]}, runs=3), tmp_path / "search")
    assert all(isinstance(settings.batch_size, int) for settings in begun.candidates)
    assert isinstance(begun.candidates[0].learning_rate, float)
    tuning.one_run(str(tmp_path / "search"), 0)  # and it is what was charged


def test_a_public_test_part_costs_nothing(plan: Any) -> None:
    public = plan_search(Search(searched().base, SPACE, runs=4, score_on="test"))
    assert public.score_noise is None
    assert public.cost.scoring == 0
    assert public.training_records == 1_000


@pytest.mark.slow
def test_runs_side_by_side_are_the_same_search(tmp_path: Path) -> None:
    result = dpulr.tune(SPACE, folder=tmp_path / "search", runs=4, jobs=2, **SMALL)
    assert result["epsilon"] <= 4.0
    assert set(result["chosen"]) == set(SPACE)


# --- bad input --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"learning_rates": [0.1, 0.2]}, "names 'learning_rates', but there is no such setting"),
        ({"target_epsilon": [1.0, 2.0]}, "names 'target_epsilon', which must be the same in all runs"),
        ({"learning_rate": []}, "gives 'learning_rate' no list of values"),
        ({"learning_rate": 0.3}, "gives 'learning_rate' no list of values"),
        ({"learning_rate": [0.3]}, "one setting only"),
        ({"learning_rate": [0.3, "fast"]}, "learning_rate is 'fast'"),
        ({"learning_rate": [0.3, -1.0]}, "learning_rate is -1"),
        ({}, "one setting only"),
    ],
)
def test_what_is_wrong_with_a_space_is_said_before_data_is_read(space: Any, words: str) -> None:
    with pytest.raises((UsageError, dpulr.errors.InvalidArgument), match=words):
        Search(Settings.build(options={**SMALL, "dataset": "no.such:data"}), space, runs=4)


def test_odd_searches_are_refused_in_a_sentence() -> None:
    base = Settings.build(options={**SMALL, "dataset": "no.such:data"})
    with pytest.raises(dpulr.errors.InvalidArgument, match="runs is 1"):
        Search(base, SPACE, runs=1)
    with pytest.raises(UsageError, match="a person could be trained on and scored on"):
        Search(Settings.build(options={**SMALL, "unit": "who"}), SPACE)
    with pytest.raises(PrivacyRefusal, match="runs that have a guarantee"):
        Search(Settings.build(options={**SMALL, "insecure_noise_seed": 1}), SPACE)
    with pytest.raises(UsageError, match="too few to tell runs apart"):
        plan_search(searched(holdout=20))


def test_budgets_that_are_too_small_are_refused() -> None:
    with pytest.raises(BudgetError, match="the budget is too small"):
        plan_search(searched(target_epsilon=1e-4, target_delta=1e-9))
    with pytest.raises(BudgetError, match="above the budget of 4"):
        plan_search(searched(noise_multiplier=0.8))
    with pytest.raises(BudgetError, match="infinite"):
        plan_search(replace(searched(noise_multiplier=0.01, target_epsilon=None), score_on="test"))


@dataclass(frozen=True)
class Unclipped(planted_bugs.Unclipped):
    """From outside: it claims what it does not do."""

    name: ClassVar[str] = "unclipped"


def test_a_mechanism_whose_bound_could_not_be_shown_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with it has no guarantee; a search would have been called certified."""
    monkeypatch.setitem(known._REGISTERED, Unclipped.name, Unclipped)
    with pytest.warns(UserWarning, match="no guarantee any more"), pytest.raises(PrivacyRefusal, match="could not be shown"):
        plan_search(searched(mechanism="unclipped", repeats=2))


def test_a_run_that_loses_its_guarantee_ends_the_search(tmp_path: Path, plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own code may do what it likes between two steps."""
    tuning.begin(plan.search, tmp_path / "search")
    steps = Training.steps

    def changing(training: Training) -> Any:
        for batch in steps(training):
            next(training.model.parameters()).data.add_(1)
            yield batch

    monkeypatch.setattr(Training, "steps", changing)
    with pytest.warns(UserWarning, match="no guarantee any more"), pytest.raises(PrivacyRefusal, match="lost its guarantee"):
        tuning.one_run(str(tmp_path / "search"), 0)


def test_tune_counts_what_accounting_counts(plan: Any) -> None:
    alone = max(accounting.epsilon([charge], 1e-4) for charge in plan.charges)
    assert plan.cost.run == pytest.approx(alone)
    assert math.isfinite(plan.cost.total)


@pytest.mark.parametrize("command", ["report", "resume"])
def test_a_search_is_no_single_run(command: str, tmp_path: Path, run_cli: Any) -> None:
    (tmp_path / "search.json").write_text("{}")
    ended = run_cli(command, tmp_path)
    assert (ended.code, "is a search (dpulr tune)" in ended.err) == (2, True)
