"""A temperature under its own share of epsilon: what is released, what it costs, and what a record can do to it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpulr import accounting
from dpulr.accounting.events import GaussianRelease
from dpulr.errors import BudgetError, InvalidArgument
from dpulr.runs.loading import load
from dpulr.temperature import TEMPERATURES, fit_temperature, is_temperature, lowest, slopes_of
from tests.support.core import engine
from tests.support.small_cli import SMALL
from tests.support.small_cli import dpulr as run


def overconfident(records: int = 2_000, factor: float = 6.0) -> tuple[nn.Linear, TensorDataset]:
    """Labels drawn from a model's own probabilities; the model's outputs are then multiplied."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 3), torch.randn(records, 6)
    with torch.no_grad():
        model.weight.mul_(3)
        y = torch.distributions.Categorical(logits=model(x)).sample()
        model.weight.mul_(factor)
        model.bias.mul_(factor)
    return model, TensorDataset(x, y)


def test_slopes_are_those_of_the_loss() -> None:
    torch.manual_seed(0)
    outputs, targets = 2 * torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    logarithms = torch.tensor(TEMPERATURES, dtype=torch.float64).log().requires_grad_()
    for i in range(5):
        losses = torch.stack([nn.functional.cross_entropy(outputs[i] / t.exp(), targets[i]) for t in logarithms])
        (wanted,) = torch.autograd.grad(losses.sum(), logarithms)
        assert torch.allclose(slopes_of(outputs, targets)[i], wanted.clamp(-5, 5), atol=1e-12)


@pytest.mark.parametrize("wanted", [0.31, 1.0, 3.3, 20.0])
def test_the_lowest_point_lies_between_temperatures(wanted: float) -> None:
    slopes = torch.tensor([math.log(t) - math.log(wanted) for t in TEMPERATURES])
    assert lowest(slopes) == pytest.approx(wanted)


def test_at_the_ends() -> None:
    assert lowest(torch.ones(len(TEMPERATURES))) == pytest.approx(TEMPERATURES[0])
    assert lowest(-torch.ones(len(TEMPERATURES))) == pytest.approx(TEMPERATURES[-1])


def test_a_fitted_temperature_is_the_right_one_and_is_paid_for() -> None:
    model, data = overconfident()
    private = engine(model, data, mechanism="gradient", batch_size=100, steps=3, noise_multiplier=None, target_epsilon=1.0)
    for group in private.optimizer.param_groups:
        group["lr"] = 0.0
    for batch in private.batches():
        private.step(*batch)
    before = private.privacy_spent().epsilon
    found = fit_temperature(private, target_epsilon=1.5)
    after = private.privacy_spent()
    assert found == pytest.approx(6, rel=0.15)  # noise of some 20 records on 2,000: five deviations
    assert after.guarantee == "certified"
    assert before <= 1 < after.epsilon <= 1.5
    assert [charge.count for charge in private.ledger.charges if is_temperature(charge.step)] == [1]
    with pytest.raises(BudgetError, match="nothing is left of epsilon"):
        fit_temperature(private, target_epsilon=1.2)


class Odd(nn.Module):
    """Raises on one record and has no number for another, if they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == 77).any()):
            raise RuntimeError("seen")
        return self.linear(x)


def test_a_record_adds_at_most_its_bound_and_odd_ones_nothing() -> None:
    """The same noise with and without the last record: the difference is what that record adds."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))
    bound = 5 * math.sqrt(len(TEMPERATURES))
    extreme = [(1e6 * torch.randn(6), 1), (torch.zeros(6), 2), (torch.full((6,), math.inf), 0), (torch.full((6,), 77.0), 0)]

    def released(x: Tensor, y: Tensor) -> np.ndarray:
        with pytest.warns(UserWarning, match="running records one by one|fewer than 300"):
            private = engine(Odd(), TensorDataset(x, y), mechanism="gradient", batch_size=10, steps=1, insecure_noise_seed=3)
        private.model.linear.load_state_dict(state)
        private.parameters_changed(public=True)
        release = GaussianRelease(0.1, mechanism="temperature", numbers=len(TEMPERATURES))
        total = private.release_sum(lambda batch: slopes_of(private.model(batch[0]), batch[1]), bound=bound, release=release)
        return np.asarray(total)

    state = nn.Linear(6, 3).state_dict()
    base = released(x, y)
    for i, (record, label) in enumerate(extreme):
        difference = released(torch.cat([x, record.unsqueeze(0)]), torch.cat([y, torch.tensor([label])])) - base
        assert np.linalg.norm(difference) <= bound
        assert (np.linalg.norm(difference) > 0) == (i < 2)


def test_regression_has_no_temperature() -> None:
    data = TensorDataset(torch.randn(400, 6), torch.randn(400, 1))
    private = engine(nn.Linear(6, 1), data, loss_fn=lambda o, t: (o - t).square()[:, 0], mechanism="gradient", steps=1)
    with pytest.raises(InvalidArgument, match="for classifiers"):
        fit_temperature(private, target_epsilon=9.0)


def test_people_have_no_temperature() -> None:
    model, data = overconfident(400)
    private = engine(model, data, mechanism="gradient", batch_size=20, steps=1, unit=[i // 2 for i in range(400)], max_per_person=2)
    with pytest.raises(InvalidArgument, match="a person may have several"):
        fit_temperature(private, target_epsilon=9.0)
    assert private.ledger.steps == 0


# --- dpulr train --temperature ------------------------------------------------------------------------------------------
def test_a_run_with_a_temperature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert run(capsys, "train", *SMALL, "--steps", 5, "--temperature", 0.1, "--out", folder).code == 0
    result = json.loads((folder / "result.json").read_text())
    assert (result["steps"], result["planned_steps"], result["updates_kept"]) == (6, 6, 5)
    assert 1.8 < result["epsilon"] <= 2
    assert 0.99 * TEMPERATURES[0] < result["temperature"] < 1.01 * TEMPERATURES[-1]
    assert load(folder).temperature == result["temperature"]
    shown = run(capsys, "evaluate", folder, "--json")
    assert json.loads(shown.out)["loss"] == pytest.approx(result["test_loss"])
    assert f"a temperature of {result['temperature']:.3g}" in run(capsys, "evaluate", folder).out
    again = run(capsys, "resume", folder)
    assert again.code == 0
    assert json.loads((folder / "result.json").read_text())["epsilon"] == result["epsilon"]


def test_a_lost_temperature_is_not_paid_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The charge is on disk, what was fitted is not: the run ends without a temperature."""
    folder = tmp_path / "run"
    run(capsys, "train", *SMALL, "--steps", 5, "--temperature", 0.1, "--out", folder)
    spent = json.loads((folder / "result.json").read_text())
    (folder / "result.json").unlink()
    (folder / "checkpoint.safetensors").unlink()
    assert run(capsys, "resume", folder).code == 0
    found = json.loads((folder / "result.json").read_text())
    assert (found["epsilon"], found["steps"], found["temperature"]) == (spent["epsilon"], spent["steps"], 1.0)


def test_a_share_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = run(capsys, "train", "--mechanism", "paper", "--temperature", 0.1, "--out", tmp_path / "run", "--allow-uncertified")
    assert ended.code != 0
    assert "temperature is a share of the budget" in ended.err


def test_what_an_engine_without_a_guarantee_charges() -> None:
    model, data = overconfident(400)
    private = engine(model, data, mechanism="gradient", batch_size=50, steps=1, insecure_noise_seed=1)
    fit_temperature(private, target_epsilon=1.0)
    assert private.privacy_spent().guarantee == "none"
    assert not accounting.Ledger(private.ledger.charges).certified
