"""Kills a random one of several training processes with SIGKILL, again and again; the others must end by themselves.

`python rank_killer.py FOLDER KILLS SEED RANKS`, in the manner of `killer.py`, whose checks it shares.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

from dpulr.cli import main
from tests.support.killer import JOB, STEPS, Run, trial, warm_up

PATIENCE = 30


class RanksRun(Run):
    """A run on several processes."""

    ranks = 2

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.named = 0

    @property
    def updates(self) -> int:
        """Of the rank that has made most: each applies what all have released together."""
        files = [Path(f"{self.updates_file}.{rank}") for rank in range(self.ranks)]
        return max(file.stat().st_size if file.exists() else 0 for file in files)

    def attempt(self, rng: random.Random | None) -> int | None:
        """Start or resume on all ranks; kill one at a random moment. The exit code of rank 0, or None if one was killed."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        before = self.log.stat().st_size if self.log.exists() else 0
        started = self.folder.exists()
        processes = [self.start(rank, port, started) for rank in range(self.ranks)]
        victim, codes, updates = None if rng is None else rng.randrange(self.ranks), dict[int, int | None](), self.updates
        if rng is not None and victim is not None:
            self.wait(processes[victim], rng)
            os.kill(processes[victim], signal.SIGKILL)
            codes = {victim: self.ended(processes[victim], time.monotonic() + PATIENCE)}
        end = time.monotonic() + PATIENCE
        codes |= {rank: self.ended(process, end) for rank, process in enumerate(processes) if rank != victim}
        said = self.log.read_text()[before:]
        if victim is None or codes[victim] is not None:
            assert set(codes.values()) == {0}, (codes, said[-2000:])
            return 0
        survivors = {code for rank, code in codes.items() if rank != victim}
        setting_up = {None} if self.updates == updates else set()  # torchrun ends those that wait for a rank to come
        assert survivors <= {0, 1, *setting_up}, (codes, said[-2000:])
        if 1 in survivors:
            self.named += f"rank {victim} (process {processes[victim]} " in said
            assert "internal error" not in said, said[-2000:]
        self.kills += 1
        self.interrupted += 0 < self.updates < STEPS
        return None

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def start(self, rank: int, port: int, started: bool) -> int:
        process = os.fork()
        if process:
            return process
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(self.ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            SMALL_JOB_UPDATES=f"{self.updates_file}.{rank}",
        )
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os._exit(main(["resume", str(self.folder)] if started else ["train", *JOB, "--out", str(self.folder)]))

    def ended(self, process: int, end: float) -> int | None:
        """The exit code, or None if it was killed: by then, as torchrun does with all that are left."""
        while time.monotonic() < end:
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            time.sleep(0.01)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        return None


if __name__ == "__main__":
    RanksRun.ranks = int(sys.argv[4])
    warm_up()
    print(json.dumps(trial(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), RanksRun)))
