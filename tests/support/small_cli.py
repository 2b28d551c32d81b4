"""`dpulr` called in the test's own process, or in one that is forked from it, with its output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch  # noqa: F401 (a forked process finds it loaded)

from dpulr.cli import main

SMALL = (
    *("--dataset", "tests.support.small_job:data", "--model", "tests.support.small_job:model"),
    *("--mechanism", "gaussian", "--repeats", "2"),
    *("--batch-size", "20", "--target-epsilon", "2", "--evaluations", "3", "--learning-rate", "0.05"),
)


ROOT = Path(__file__).parents[2]


def child_environment(**more: str) -> dict[str, str]:
    """For a process of its own: one thread, and the tests' helpers are found from any folder."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def dpulr(capture: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    capture.readouterr()
    code = main([str(argument) for argument in arguments])
    shown = capture.readouterr()
    assert "Traceback" not in shown.out + shown.err
    return Ended(code, shown.out, shown.err)


class Forked:
    """`dpulr` in a process of its own that has everything loaded: it begins at once. `before` is called in it first.

    What it prints goes to files in `folder`, or to the file number `terminal`.
    """

    def __init__(
        self, *arguments: object, folder: Path, before: Callable[[], object] = lambda: None, terminal: int | None = None
    ) -> None:
        self._names = folder / "printed.out", folder / "printed.err"
        self.process = os.fork()
        if self.process == 0:
            try:
                for number, name in zip((1, 2), self._names, strict=True):
                    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT) if terminal is None else terminal, number)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                before()
                code = main([str(argument) for argument in arguments])
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            finally:
                os._exit(99)

    def running(self) -> bool:
        return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def end(self) -> Ended:
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        return Ended(code, *(name.read_text() if name.exists() else "" for name in self._names))
