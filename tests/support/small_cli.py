"""`dpulr` called in the test's own process, with its output."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dpulr.cli import main

SMALL = (
    *(
        "--dataset",
        "tests.support.small_job:data",
        "--model",
        "tests.support.small_job:model",
        "--mechanism",
        "gaussian",
        "--repeats",
        "2",
    ),
    *("--batch-size", "20", "--target-epsilon", "2", "--evaluations", "3", "--learning-rate", "0.05"),
)


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
