"""A black box held by real Ray actors, in a process of its own; prints what it found as JSON. `python ray_box.py FOLDER`.

Each actor writes its process number into a file when it begins. One is killed in the middle of a training; two wait for
each other's call; another box hangs once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import nn

import dpulr
from dpulr.errors import BlackBoxError
from tests.support.core import engine, points

STEPS, KILLED_AFTER = 6, 2


def steps(x: np.ndarray) -> np.ndarray:
    """Flat almost everywhere."""
    return np.round(4 * x) / 4


def announced(folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    (folder / str(os.getpid())).touch()
    return steps


def hanging_once(folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Hangs in the first actor, and works in those that are started after it."""
    first = not (folder / "hung").exists()
    (folder / "hung").touch()
    return (lambda x: time.sleep(600) or x) if first else steps


def meeting(folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Returns when two processes have been called."""

    def function(x: np.ndarray) -> np.ndarray:
        (folder / str(os.getpid())).touch()
        end = time.monotonic() + 60
        while len(list(folder.iterdir())) < 2:
            if time.monotonic() > end:
                raise TimeoutError("nobody else was called")
            time.sleep(0.01)
        return x

    return function


def picky() -> Callable[[np.ndarray], np.ndarray]:
    """One record ends its actor, another hangs, whenever they come."""

    def function(x: np.ndarray) -> np.ndarray:
        if (x == 7).any():
            os._exit(1)
        if (x == 8).any():
            time.sleep(600)
        return steps(x)

    return function


def failing() -> Callable[[np.ndarray], np.ndarray]:
    def function(x: np.ndarray) -> np.ndarray:
        raise ValueError("the board is full")

    return function


def trained(box: nn.Module, after_step: Callable[[int], None] = lambda number: None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), box, nn.Linear(4, 3))
    private = engine(model, points(40), mechanism=dpulr.HiddenDirection(repeats=2, radius=0.5), steps=STEPS, insecure_noise_seed=3)
    for batch in private.batches():
        private.step(*batch)
        after_step(private.steps_taken)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def main(folder: Path) -> dict[str, Any]:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    actors, calls, meetings = folder / "actors", folder / "calls", folder / "meetings"
    actors.mkdir()
    box = dpulr.BlackBox.ray(partial(announced, actors), (4,), actors=2, batch_size=10, name="steps", ray_options={"num_cpus": 0})
    killed: list[int] = []

    def kill(number: int) -> None:
        if number == KILLED_AFTER:
            killed.append(min(int(path.name) for path in actors.iterdir()))
            os.kill(killed[0], signal.SIGKILL)

    several = trained(box, kill)
    found: dict[str, Any] = {"equal": several == trained(dpulr.BlackBox(steps, (4,))), "processes": len(list(actors.iterdir()))}
    meetings.mkdir()
    both = dpulr.BlackBox.ray(partial(meeting, meetings), (4,), actors=2, batch_size=10, ray_options={"num_cpus": 0})
    found["together"] = both(torch.ones(20, 4)).sum().item()
    calls.mkdir()
    options = {"timeout": 5.0, "retries": 2, "backoff": 0.1, "ray_options": {"num_cpus": 0}}
    slow = dpulr.BlackBox.ray(partial(hanging_once, calls), (4,), actors=1, **options)
    found["after_hanging"] = slow(torch.full((1, 4), 0.3)).tolist()
    odd = dpulr.BlackBox.ray(picky, (4,), actors=1, restarts=0, timeout=3.0, ray_options={"num_cpus": 0})
    found["after_odd_records"] = []
    for value in (7.0, 7.0, 8.0):
        with suppress(BlackBoxError):
            odd(torch.full((1, 4), value))
        found["after_odd_records"] += odd(torch.full((1, 4), 0.3)).flatten().tolist()
    try:
        dpulr.BlackBox.ray(failing, (4,), actors=1, ray_options={"num_cpus": 0})(torch.zeros(1, 4))
    except BlackBoxError as problem:
        found["failing"] = str(problem)
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
