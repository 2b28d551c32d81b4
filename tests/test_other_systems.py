"""As far as it can be seen on Linux: the library asks for nothing that Windows and macOS lack, and starts processes as they do."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dpulr import read_ahead
from dpulr.records import Records
from tests.support.core import CPU
from tests.support.small_cli import SMALL, child_environment
from tests.test_read_ahead import Made, values

ROOT = Path(__file__).parent.parent
WITHOUT = f"""
import os, pkgutil, runpy, signal, sys, warnings
import filelock, platformdirs, sklearn.base, torch.distributed.run, typer.main  # what others do is not looked at

for name in ("fcntl", "grp", "posix", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None
for name in (
    *("fork", "getuid", "geteuid", "getpgid", "killpg", "mkfifo", "register_at_fork", "sched_getaffinity", "setsid", "statvfs"),
    *("uname", "sysconf", "chown", "pread", "pwrite", "posix_fallocate", "O_DIRECTORY", "O_NOFOLLOW", "O_SYNC"),
):
    delattr(os, name)
for name in ("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "alarm", "pthread_sigmask", "setitimer"):
    delattr(signal, name)
warnings.filterwarnings("error", category=EncodingWarning, module="dpulr")  # Windows has code pages

import dpulr
from dpulr.cli import main

for module in pkgutil.walk_packages(dpulr.__path__, "dpulr."):
    if module.name not in ("dpulr.__main__", "dpulr.model.ray_pool"):  # a program; and ray, which is an extra
        __import__(module.name)
small = {SMALL!r}
with open("t.csv", "w", encoding="utf-8") as table:
    table.write("naïve,sick\\n" + "1,no\\n2,yes\\n" * 100)
for arguments in (
    ["train", *small, "--steps", "4", "--out", "run"],
    ["resume", "run", "--steps", "6", "--epsilon", "3"],
    ["evaluate", "run"],
    ["report", "run"],
    ["data", "schema", "t.csv", "--label", "sick", "--out", "t.toml"],
    ["train", "--dataset", "csv:t.csv", "--schema", "t.toml", "--allow-uncertified", "--steps", "2", "--evaluations", "0"],
    ["tune", *small, "--space", "learning_rate=0.1,0.2", "--runs", "1.5", "--steps", "2", "--score-on", "test", "--out", "search"],
):
    assert main(arguments) == 0, arguments
"""


@pytest.mark.slow
def test_nothing_is_asked_for_that_windows_lacks(tmp_path: Path) -> None:
    """Modules, functions and signals of POSIX are taken away, and a text file that is opened without an encoding is an error."""
    command = [sys.executable, "-X", "warn_default_encoding", "-c", WITHOUT]
    ended = subprocess.run(command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_workers_that_are_no_forks_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows and macOS a worker is a fresh interpreter, to which the data set is sent."""
    context = multiprocessing.get_context("spawn")
    asked: list[Any] = []
    monkeypatch.setattr(read_ahead, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(read_ahead.multiprocessing, "get_context", lambda way: asked.append(way) or context)
    rows = np.arange(20)
    (batch, _), (expected, _) = Records(Made(), CPU, num_workers=1).start(rows)(), Records(Made(), CPU).read(rows)
    assert asked == [None]  # the system's own way
    assert values(batch) == values(expected)
