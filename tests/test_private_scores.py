"""Noisy accuracies: the noise is discrete Laplace, a record moves the count by at most 1, and what it costs is charged first."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import dpulr
from dpulr.errors import InvalidArgument, ModelRefused
from dpulr.private_scores import HeldOut, discrete_laplace
from tests.support import small_job
from tests.support.small_cli import SMALL, Ended


def test_the_noise_has_the_probabilities_that_the_proof_assumes() -> None:
    """Pearson's statistic over 13 cells; above 45 with probability 1e-5 if the noise is right."""
    draws, scale = 20_000, Fraction(5, 2)
    counts = Counter(max(-6, min(6, discrete_laplace(scale))) for _ in range(draws))
    ratio = math.exp(-1 / scale)
    chance = {z: (1 - ratio) / (1 + ratio) * ratio ** abs(z) for z in range(-5, 6)}
    chance |= dict.fromkeys((-6, 6), ratio**6 / (1 + ratio))
    assert sum(chance.values()) == pytest.approx(1)
    assert sum((counts[z] - draws * p) ** 2 / (draws * p) for z, p in chance.items()) < 45


class Odd(nn.Module):
    """Raises for some records, as a black box may."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x[:, 0] == 7).any():
            raise ValueError("this record")
        return torch.stack([x[:, 0], x[:, 1]], 1)


def right(rows: list[tuple[float, float, int]]) -> int:
    values = torch.tensor([row[:2] for row in rows])
    return HeldOut(Odd(), TensorDataset(values, torch.tensor([row[2] for row in rows])), batch_size=3).right_answers()


@pytest.mark.parametrize("row", [(7.0, 0.0, 0), (math.nan, 0.0, 0), (1.0, math.inf, 1), (0.0, 1.0, 99), (0.0, 1.0, -1)])
def test_a_bad_record_is_a_wrong_answer_and_nothing_else(row: tuple[float, float, int]) -> None:
    others = [(1.0, 0.0, 0), (0.0, 1.0, 1), (1.0, 0.0, 1), (0.0, 1.0, 1)]
    assert right(others) == 3
    assert right([*others[:2], row, *others[2:]]) == 3


class Branches(nn.Module):
    """One record above 50 would turn the answers of its whole batch around."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x if x.max() > 50 else x


class NearlyEqual(nn.Module):
    """The second output is the first, computed for each record in the same way whatever its batch is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x.numpy() > 1e9).any():
            raise KeyError("patient 17")
        hidden = torch.relu((x.unsqueeze(1) * self.body[0].weight).sum(2) + self.body[0].bias)
        same = (hidden * self.body[2].weight).sum(1, keepdim=True) + self.body[2].bias
        return torch.cat([self.body(x), same], dim=1)


def test_a_branch_on_values_is_each_record_s_own() -> None:
    """A model that reads values sees one record at a time: else a single one would decide over all answers."""
    x = torch.rand(20, 2)
    y = x.argmax(1)
    alone = HeldOut(Branches(), TensorDataset(x, y)).right_answers()
    large = torch.tensor([[100.0, 0.0]])
    joined = HeldOut(Branches(), TensorDataset(torch.cat([x, large]), torch.cat([y, torch.tensor([0])]))).right_answers()
    assert alone == 20
    assert joined == 20


class MixesInEvalMode(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training else x - x.mean(0)


def test_a_model_that_mixes_records_in_eval_mode_is_refused() -> None:
    with pytest.raises(ModelRefused, match="mixes records"):
        HeldOut(MixesInEvalMode(), TensorDataset(torch.rand(20, 2), torch.zeros(20).long()))


class Coins(nn.Module):
    """Random answers, in eval mode too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 100 * torch.randn_like(x)


class Jitters(Dataset[Any]):
    """Random records."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, row: int) -> Any:
        return torch.randn(2), 0


@pytest.mark.parametrize("random", ["model", "data"])
def test_what_a_model_or_a_data_set_draws_is_secret(random: str) -> None:
    """Whoever knows the seed must not know the answers. Two counts of 400 coins agree with probability 0.03: not four times."""
    zeros = TensorDataset(torch.zeros(400, 2), torch.zeros(400).long())
    held_out = HeldOut(Coins(), zeros) if random == "model" else HeldOut(nn.Identity(), Jitters())
    found = set()
    for _ in range(5):
        torch.manual_seed(0)
        found.add(held_out.right_answers())
    assert len(found) > 1


def test_a_record_that_raises_leaves_the_answers_of_the_others() -> None:
    """Two outputs that differ by rounding alone: which one is larger depends on the kernels. (Finding 12.)"""
    x = 1e7 * torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    model = NearlyEqual()
    with torch.no_grad():
        y = model(x).argmax(1)
    assert HeldOut(model, TensorDataset(x, y)).right_answers() == 200
    joined = TensorDataset(torch.cat([x, torch.full((1, 6), 1e10)]), torch.cat([y, y[:1]]))
    assert HeldOut(model, joined).right_answers() == 200


def test_what_can_not_have_an_accuracy_is_refused_before_it_is_charged() -> None:
    engine = trained()
    with pytest.raises(InvalidArgument, match=r"one output per class"):
        engine.private_accuracy(TensorDataset(torch.zeros(3, 6), torch.zeros(3)), epsilon=0.1)
    with pytest.raises(InvalidArgument, match="epsilon"):
        engine.private_accuracy(small_job.data()[1], epsilon=0)
    assert engine.ledger.evaluations == []


def test_an_engine_adds_what_an_evaluation_costs() -> None:
    engine = trained()
    before = engine.privacy_spent().epsilon
    accuracy = engine.private_accuracy(small_job.data()[1], epsilon=0.5)
    spent = engine.privacy_spent()
    assert abs(accuracy - dpulr.evaluate(engine.model, small_job.data()[1])) < 0.3
    assert spent.epsilon == pytest.approx(before + 0.5)
    assert "and noisy evaluations on held-out records (epsilon 0.5 of it)" in str(spent)
    again = trained(take=0)
    again.load_state_dict(engine.state_dict())
    assert again.privacy_spent().epsilon == spent.epsilon


def trained(take: int = 2) -> dpulr.PrivacyEngine:
    model = small_job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.CrossEntropyLoss(reduction="none")
    engine = dpulr.PrivacyEngine(model, optimizer, small_job.data()[0], loss, batch_size=50, steps=4, noise_multiplier=2.0)
    for x, y in engine.batches(take) if take else ():
        engine.step(x, y)
    return engine


# --- in a run -------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_run_keeps_a_share_for_its_evaluations(tmp_path: Path, run_cli: Callable[..., Ended]) -> None:
    folder = tmp_path / "run"
    more = ["--holdout", 60, "--evaluations", 2, "--evaluation-epsilon", 0.5, "--steps", 12, "--out", folder]
    ended = run_cli("train", *SMALL, *more)
    assert ended.code == 0, ended.err
    result = read(folder)
    assert 1.9 < result["epsilon"] <= 2
    assert result["evaluation_epsilon"] == 0.5
    assert result["test_noise"] == pytest.approx(1 / 0.25 / 60)
    assert "test_classes" not in result
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert [line["epsilon"] for line in lines if line["kind"] == "evaluation"] == [0.25, 0.25]
    run_cli("report", folder)
    assert "noisy evaluations on held-out records (epsilon 0.5 of it)" in (folder / "report.html").read_text()
    ended = run_cli("evaluate", folder)
    assert (ended.code, "are private" in ended.err, ended.out) == (3, True, "")  # no accuracy without noise
    assert run_cli("evaluate", folder, "--dataset", "tests.support.small_job:data").code == 0
    assert run_cli("resume", folder, "--target-epsilon", 3).code == 0  # the share is used up: no further evaluation
    result = read(folder)
    assert 2 < result["epsilon"] <= 3
    assert result["evaluation_epsilon"] == 0.5


def test_a_run_without_evaluations(tmp_path: Path, run_cli: Callable[..., Ended]) -> None:
    folder = tmp_path / "run"
    assert run_cli("train", *SMALL, "--evaluations", 0, "--steps", 12, "--out", folder).code == 0
    assert not [name for name in read(folder) if name.startswith("test_")]
    assert run_cli("report", folder).code == 0


@pytest.mark.parametrize("share", [2, 2.5])
def test_a_share_is_a_part_of_the_budget(share: float, run_cli: Callable[..., Ended], tmp_path: Path) -> None:
    ended = run_cli("train", *SMALL, "--evaluation-epsilon", share, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "a share of target_epsilon, 2" in ended.err


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())
