"""Kills training with SIGKILL at random moments and resumes it, again and again; prints what it found as JSON.

`python killer.py FOLDER KILLS SEED`. It imports everything once and forks a process for each attempt, so that an attempt costs
a fraction of a second; every one of them is a process of its own and is killed by the operating system.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from dpulr import accounting
from dpulr.accounting.disk_ledger import DiskLedger, ledger_digest
from dpulr.cli import main, progress
from dpulr.runs import Settings, checkpoint, load
from dpulr.runs.loading import load_data
from dpulr.runs.run import start
from dpulr.runs.training import Training
from tests.support import small_job

STEPS, BATCH, EPSILON, DELTA = 300, 20, 2.0, 1e-5
JOB = [
    *("--dataset", "tests.support.small_job:data", "--model", "tests.support.small_job:model"),
    *("--mechanism", "gaussian", "--repeats", "2"),
    *("--batch-size", str(BATCH), "--steps", str(STEPS), "--target-epsilon", str(EPSILON), "--evaluations", "15"),
    *("--learning-rate", "0.05"),
]


class Run:
    """A run and the checks on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.updates_file = folder.with_suffix(".updates")
        self.steps = self.kills = self.interrupted = 0

    def attempt(self, rng: random.Random | None) -> int | None:
        """Start or resume in a new process; kill it at a random moment. The exit code, or None if it was killed."""
        process = os.fork()
        if process == 0:
            os.environ["SMALL_JOB_UPDATES"] = str(self.updates_file)
            log = os.open(self.folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            started = self.folder.exists()
            os._exit(main(["resume", str(self.folder)] if started else ["train", *JOB, "--out", str(self.folder)]))
        if rng is not None:
            self.wait(process, rng)
            os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        if os.WIFSIGNALED(status):
            self.kills += 1
            self.interrupted += 0 < self.updates < STEPS
            return None
        return os.WEXITSTATUS(status)

    def wait(self, process: int, rng: random.Random) -> None:
        """Half of the moments lie anywhere, setting up included; half of them in the training, a random time after an update."""
        if rng.random() < 0.4:
            time.sleep(rng.uniform(0, 1.5))
            return
        before, wanted, end = self.updates, rng.randint(1, 60), time.monotonic() + 60
        while self.updates < before + wanted and time.monotonic() < end and not _ended(process):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))

    @property
    def updates(self) -> int:
        """Updates counted without the ledger."""
        return self.updates_file.stat().st_size if self.updates_file.exists() else 0

    def check(self) -> None:
        """What must hold at every moment."""
        if not self.folder.exists():
            assert self.updates == 0, "updates without a ledger"
            return
        ledger = DiskLedger.open(self.folder, ledger_digest((self.folder / "config.json").read_bytes()))
        noise, rate = ledger.start.noise_multiplier, BATCH / small_job.RECORDS
        assert ledger.steps >= self.updates, f"{self.updates} updates, but {ledger.steps} in the ledger"
        assert ledger.steps >= self.steps, "the ledger has shrunk"
        assert ledger.steps <= self.updates + self.kills, "more was charged than one step per kill"
        self.steps = ledger.steps
        spent = ledger.epsilon(DELTA)
        if self.updates:
            counted = accounting.gaussian_epsilon(noise_multiplier=noise, sample_rate=rate, steps=self.updates, delta=DELTA)
            assert spent >= counted, f"the ledger says {spent}, the updates cost {counted}"
        assert spent <= EPSILON, f"{spent} of {EPSILON} is spent"
        if (self.folder / checkpoint.CHECKPOINT).exists():
            checkpoint.read(self.folder / checkpoint.CHECKPOINT)


def _ended(process: int) -> bool:
    """Whether the process is gone, without reaping it."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def trial(folder: Path, kills: int, seed: int, kind: type[Run] = Run) -> dict[str, float]:
    rng = random.Random(seed)
    runs = [kind(folder / "run-0")]
    done = 0
    accuracies = []
    while done < kills:
        run = runs[-1]
        code = run.attempt(rng)
        run.check()
        done += code is None
        assert code in (None, 0), f"exit code {code}: {run.folder.with_suffix('.log').read_text()[-500:]}"
        if code == 0:
            runs.append(kind(folder / f"run-{len(runs)}"))
    for run in runs:
        assert run.attempt(None) == 0, run.folder.with_suffix(".log").read_text()[-500:]
        run.check()
        result = json.loads((run.folder / "result.json").read_text())
        assert result["steps"] == STEPS
        assert run.updates <= STEPS
        accuracies.append(load(run.folder).score().accuracy)
        assert accuracies[-1] == result["test_accuracy"]
    interrupted = sum(run.interrupted for run in runs)
    named = sum(getattr(run, "named", 0) for run in runs)
    return {"kills": done, "runs": len(runs), "interrupted": interrupted, "least_accuracy": min(accuracies), "named": named}


def warm_up() -> None:
    """Modules that are loaded on first use are loaded now, not in each process again."""
    settings = Settings(dataset="tests.support.small_job:data", mechanism="gaussian", batch_size=BATCH, steps=1)
    Training(settings, load_data(settings)[0], small_job.model())
    assert progress
    assert start


if __name__ == "__main__":
    warm_up()
    print(json.dumps(trial(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
