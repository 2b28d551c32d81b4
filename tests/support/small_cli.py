"""`dpulr` called in the test's own process, with its output."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

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
