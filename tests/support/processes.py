"""A function on several real processes, joined by torch.distributed (gloo): what tests of distributed runs share."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.core import engine, train

SECONDS = 120


def on_ranks(size: int, function: Callable[..., Any], *args: Any, silent: Sequence[int] = ()) -> list[Any]:
    """What `function(rank, *args)` returns on each rank. An exception comes back as a value. `silent` ranks are not waited for."""
    _load_all()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(rank, size, Path(folder) / "store", send, function, args))
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        found = []
        for rank, pipe in enumerate(pipes):
            try:
                waited = rank not in silent and pipe.poll(SECONDS)
                found.append(pickle.loads(pipe.recv_bytes()) if waited else None)
            except EOFError:
                found.append(None)
        for process in processes:
            process.kill()
            process.join()
    for value in found:
        if isinstance(value, Unexpected):
            raise AssertionError(value.text)
    assert all(value is not None for rank, value in enumerate(found) if rank not in silent), "a process ended without a word"
    return found


@cache
def _load_all() -> None:
    """Modules that are loaded on first use are loaded here, once, not in each process again."""
    train(engine(mechanism="hidden-direction", steps=1))


class Unexpected:
    """A failure that no test asks for."""

    def __init__(self, text: str) -> None:
        self.text = text


class Failed:
    """An exception of one rank."""

    def __init__(self, problem: BaseException) -> None:
        self.kind, self.text = type(problem).__name__, str(problem)

    def __repr__(self) -> str:
        return f"{self.kind}: {self.text}"


def _child(rank: int, size: int, store: Path, send: Any, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
        )
        value = function(rank, *args)
    except AssertionError:
        value = Unexpected(traceback.format_exc())
    except Exception as problem:
        value = Failed(problem)
    send.send_bytes(pickle.dumps(value))
    send.close()
    os._exit(0)
