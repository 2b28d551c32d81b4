"""Starting several processes by torchrun's own launcher, and joining them when a command runs under torchrun."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from dpulr.errors import RankLost, UsageError

MEETING_SECONDS = 300
RANK_TIMEOUT = 300.0
"""Seconds that a rank waits for another, where nothing else is said."""


def rank() -> int:
    """The rank that the environment gives to this process; 0 where there is none. Imports no torch."""
    return int(os.environ.get("RANK", "0")) if under_torchrun() else 0


def under_torchrun() -> bool:
    """Whether torchrun, or something that sets the same variables, has started several processes."""
    there = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return there and os.environ["WORLD_SIZE"] != "1"


def restarted() -> bool:
    """Whether torchrun has started these processes again, after a failure."""
    return under_torchrun() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


@contextmanager
def joined() -> Iterator[None]:
    """While it lasts, the processes that torchrun has started form a group."""
    if not under_torchrun():
        yield
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost rank is named: no stack of torch's own above that
    import torch.distributed as dist

    size, timeout = int(os.environ["WORLD_SIZE"]), timedelta(seconds=MEETING_SECONDS)
    try:
        dist.init_process_group("gloo", store=_fresh_store(size, timeout), rank=rank(), world_size=size, timeout=timeout)
    except RuntimeError as problem:
        raise RankLost(
            f"the {size} processes could not meet: one has ended, or did not come (time-out: {MEETING_SECONDS} s)."
        ) from problem
    try:
        yield
    finally:
        dist.destroy_process_group()


def _fresh_store(size: int, timeout: timedelta) -> Any:
    """The store through which processes find each other. torchrun may keep one through all restarts (torch 2.13 does), with the
    addresses of processes that are gone: each start gets a part of its own.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*address, size, is_master=not kept and rank() == 0, timeout=timeout, wait_for_workers=not kept)
    return PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def launch(workers: int, arguments: Sequence[str], *, restarts: int = 0) -> int:
    """Run `python -m dpulr` with these arguments in so many processes; the exit code of the first that failed, or 0.

    A failure starts all of them again, `restarts` times: the command must know how to go on.
    """
    if under_torchrun():
        raise UsageError("--workers starts the processes itself; under torchrun they are there already.")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # each process says itself what is wrong
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=secrets.token_hex(8),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.2,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "dpulr", *arguments)
    except ChildFailedError as failed:
        first, failure = failed.get_first_failure()
        if failure.exitcode < 0:
            print(f"dpulr: rank {first} was ended by signal {-failure.exitcode}.", file=sys.stderr)
        return max(1, failure.exitcode)
    return 0
