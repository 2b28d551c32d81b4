"""The folder of a program's own loop: steps on disk first, going on after a crash, and the same report."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dpulr
from dpulr.errors import PrivacyRefusal, UsageError
from tests.support import small_job
from tests.support.small_cli import Ended


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def made(noise: float = 2.0) -> dpulr.PrivacyEngine:
    model = small_job.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = nn.CrossEntropyLoss(reduction="none")
    settings: dict[str, Any] = {"batch_size": 50, "steps": 6, "noise_multiplier": noise, "target_epsilon": 9.0}
    return dpulr.PrivacyEngine(model, optimizer, small_job.data()[0], loss, mechanism="gradient", **settings)


def take(engine: dpulr.PrivacyEngine, steps: int) -> None:
    for x, y in engine.batches(steps):
        engine.step(x, y)


def test_a_loop_of_ones_own_has_a_folder_and_a_report(tmp_path: Path, run_cli: Callable[..., Ended]) -> None:
    engine, folder, test = made(), tmp_path / "run", small_job.data()[1]
    run = dpulr.runs.record(engine, folder)
    take(engine, 3)
    assert len((folder / "ledger.jsonl").read_text().splitlines()) == 1 + 1 + 3
    assert run.evaluate(test)["step"] == 3
    take(engine, 3)
    result = run.finish(test)
    assert result["epsilon"] == engine.privacy_spent().epsilon
    assert result == json.loads((folder / "result.json").read_text())
    page = (folder / "report.html").read_text()
    assert "For a paper" in page
    assert "Trained with (" in page
    assert "<h2>Classes</h2>" in page
    assert "held-out data counts as public" in page
    assert run_cli("report", folder).code == 0
    assert "program&#39;s own" not in page
    assert "a program's own" in run_cli("resume", folder).err


def test_after_a_crash_it_goes_on(tmp_path: Path) -> None:
    engine, folder = made(), tmp_path / "run"
    run = dpulr.runs.record(engine, folder)
    take(engine, 2)
    run.save()
    take(engine, 1)
    weights = [p.clone() for p in engine.model.parameters()]
    run._held.close()  # as the end of a process does
    again = made()
    dpulr.runs.record(again, folder)
    assert again.ledger.steps == 3
    assert not all(torch.equal(a, b) for a, b in zip(weights, again.model.parameters(), strict=True))  # the third is lost
    take(again, 9)
    assert again.steps_taken == 6
    assert again.privacy_spent().guarantee == "certified"


def test_what_it_refuses(tmp_path: Path) -> None:
    engine = made()
    take(engine, 1)
    with pytest.raises(UsageError, match="before the first step"):
        dpulr.runs.record(engine, tmp_path / "run")
    first = dpulr.runs.record(made(), tmp_path / "run")
    with pytest.raises(PrivacyRefusal, match="another process"):
        dpulr.runs.record(made(), tmp_path / "run")
    first._held.close()
    with pytest.raises(PrivacyRefusal, match=r"noise_multiplier=2\.0"):
        dpulr.runs.record(made(noise=3.0), tmp_path / "run")


def test_several_runs_state_their_joint_epsilon(tmp_path: Path, run_cli: Callable[..., Ended]) -> None:
    charges = []
    for name in ("a", "b"):
        engine = made()
        run = dpulr.runs.record(engine, tmp_path / name)
        take(engine, 6)
        run.finish(small_job.data()[1])
        charges += engine.ledger.charges
    assert run_cli("report", tmp_path / "a", tmp_path / "b").code == 0
    joint = dpulr.accounting.privacy_spent(charges, 1e-5).epsilon
    text = (tmp_path / "comparison.html").read_text()
    assert f"trained on the same records: {dpulr.accounting.rounding.up(joint)} at delta 1e-05" in text
