"""Records read ahead by worker processes: the same batches, charged first, with randomness that nobody knows."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from dpulr.records import Records
from tests.support.core import CPU, engine, mlp, points


class Made(Dataset[Any]):
    """Records of every kind. `odd` says what happens when a record is asked for."""

    def __init__(self, size: int = 40, odd: dict[int, Any] | None = None) -> None:
        self.size, self.odd = size, odd or {}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> Any:
        if row in self.odd:
            self.odd[row]()
        x = torch.full((6,), float(row))
        return {"x": x, "half": x[:2].bfloat16(), "flag": torch.tensor(row % 2 == 0)}, row % 3


def raised(error: BaseException) -> Any:
    def ask() -> None:
        raise error

    return ask


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def values(batch: Any) -> list[Any]:
    inputs, targets = batch
    return [*(leaf.float().tolist() for leaf in inputs.values()), targets.tolist()]


def test_workers_read_what_one_process_reads() -> None:
    data = Made(40, {5: raised(OSError("patient 17")), 9: raised(KeyError())})
    rows = np.random.default_rng(0).permutation(38)
    for view in (data, Subset(data, range(39, 0, -1))):
        alone, ahead = Records(view, CPU), Records(view, CPU, num_workers=2)
        (batch, kept), (expected, present) = ahead.start(rows)(), alone.read(rows)
        assert values(batch) == values(expected)
        assert kept.tolist() == present.tolist()
    assert ahead.start(np.empty(0, dtype=np.int64))()[0][1].shape == (0,)
    assert ahead.start(np.array([34]))()[0][1].shape == (0,)


def test_a_record_that_ends_its_worker_contributes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """In one process it would end the run: the parent must not be asked for it."""
    here = os.getpid()

    def ends() -> None:
        assert os.getpid() != here
        killed()

    data = Made(12, {3: ends, 7: raised(SystemExit(3)), 8: raised(KeyboardInterrupt())})
    records = Records(data, CPU, num_workers=1)
    for _ in range(2):
        batch, kept = records.start(np.arange(12))()
        assert batch[0]["x"][:, 0].tolist() == kept.tolist() == [0, 1, 2, 4, 5, 6, 9, 10, 11]
    assert capfd.readouterr() == ("", "")


class Noisy(Dataset[Any]):
    """Augments from all global generators."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, row: int) -> Any:
        return torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))], dtype=torch.float64), 1


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_data_set_draws_is_secret(workers: int) -> None:
    """Whatever the user has seeded; and the user's generators are left alone. Three draws in 30 records: no two are equal."""
    seen = []
    for _ in range(2):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        private = engine(
            torch.nn.Linear(3, 2, dtype=torch.float64),
            Noisy(),
            sample_rate=1.0,
            expected_batch_size=30.0,
            steps=2,
            num_workers=workers,
        )
        states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        for inputs, targets in private.batches():
            seen += inputs.flatten().tolist()
            private.step(inputs, targets)
        assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert len(set(seen)) == len(seen) == 2 * 2 * 90


class Charged(Dataset[Any]):
    """Every record says in its target how many steps were charged when it was read: from a file that the test writes."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> Any:
        return torch.zeros(6), int(self.path.read_text())


def test_a_step_is_charged_before_it_is_read_and_only_one_is_ahead(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "charged"
    path.write_text("0")
    private = engine(mlp(), Charged(path), sample_rate=1.0, expected_batch_size=4.0, steps=6, num_workers=1)
    append = private.ledger.append

    def noted(*args: Any) -> None:
        append(*args)
        path.write_text(str(private.ledger.steps))

    monkeypatch.setattr(private.ledger, "append", noted)
    seen, taken = [], []
    for inputs, targets in private.batches():
        time.sleep(0.02)
        seen.append(targets.unique().tolist())
        taken.append((private.steps_taken, private.ledger.steps))
        private.step(inputs, targets)
    assert seen == [[1], [2], [3], [4], [5], [6]] or all(step <= min(own) <= step + 1 for step, own in enumerate(seen, start=1))
    assert taken == [(0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 6)]
    assert private.steps_taken == private.ledger.steps == 6


def test_a_batch_that_was_read_ahead_is_not_drawn_again() -> None:
    private = engine(mlp(), Subset(points(40), range(40)), sample_rate=0.5, expected_batch_size=20.0, steps=5)
    assert not private.records.read_ahead  # rows of tensors
    private = engine(mlp(), PointByPoint(), sample_rate=0.5, expected_batch_size=20.0, steps=5, num_workers=1)
    for batch in private.batches():
        private.step(*batch)
        break
    assert (private.steps_taken, private.ledger.steps) == (1, 2)
    waiting = private._drawing._ahead
    for batch in private.batches(1):
        assert private._drawing._ahead is None
        private.step(*batch)
    assert waiting is not None
    assert (private.steps_taken, private.ledger.steps) == (2, 2)
    assert sum(1 for batch in private.batches() if private.step(*batch) is None) == 3


class PointByPoint(Dataset[Any]):
    def __init__(self) -> None:
        self.points = points(40)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Any:
        return self.points[row]


_ENDS = """
import os, signal, sys
import numpy as np, torch
from dpulr.records import Records
from tests.test_read_ahead import Made
records = Records(Made(), torch.device("cpu"), num_workers=2)
records.start(np.arange(40))()
print(*records._workers._pool._processes, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_end_with_their_parent() -> None:
    """Also when it is killed."""
    ended = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, check=False)
    workers = [int(number) for number in ended.stdout.split()]
    assert len(workers) == 2, ended.stderr
    for _ in range(200):
        if not any(alive(worker) for worker in workers):
            return
        time.sleep(0.05)
    raise AssertionError("workers are left")


def alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as about:
            return about.read().split()[2] != "Z"
    except OSError:
        return False
