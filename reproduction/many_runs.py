"""Many runs, side by side in processes of one thread each, and who watches them.

Each result is kept as soon as it is there: a stopped command loses only the runs under way.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from reproduction.results_file import add, found
from reproduction.run import Result, Run


class Watcher:
    """Writes a line for each quarter of a run, and one when it has finished."""

    def __init__(self) -> None:
        self.quarters: dict[str, int] = {}

    def began(self, total: int, known: int) -> None:
        self.say(f"{total} runs, {known} of them known")

    def moved(self, title: str, share: float) -> None:
        quarter = int(4 * share)
        if self.quarters.get(title, 0) < quarter < 4:
            self.quarters[title] = quarter
            self.say(f"{title}: {25 * quarter} %")

    def done(self, title: str, result: Result) -> None:
        self.say(f"{title}: accuracy {result['test_accuracy']:.2%}, {result['seconds']:.0f} s")

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def run_all(runs: Sequence[Run], *, jobs: int | None = None, watcher: Watcher | None = None) -> list[Result]:
    """Make the runs that have no result yet, `jobs` at a time (by default one for each core), and return the results of all."""
    watcher = watcher or Watcher()
    missing = [run for run in runs if not found([run])]
    watcher.began(len(runs), len(runs) - len(missing))
    jobs = min(jobs or cores(), len(missing))
    finished = _side_by_side(missing, jobs, watcher) if jobs > 1 else _one_by_one(missing, watcher)
    for run, result in finished:
        add(run, result)
        watcher.done(run.title, result)
    return found(runs)


def cores() -> int:
    """How many processes can run without sharing a core."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _one_by_one(runs: Sequence[Run], watcher: Watcher) -> Iterator[tuple[Run, Result]]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for run in runs:
            yield run, run.train(partial(watcher.moved, run.title))
            gc.collect()  # a run's tensors hang in cycles
    finally:
        torch.set_num_threads(threads)


def _side_by_side(runs: Sequence[Run], jobs: int, watcher: Watcher) -> Iterator[tuple[Run, Result]]:
    context = multiprocessing.get_context("spawn")
    news: Any = context.Queue()
    with _one_thread_each():
        pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(news,))
        try:
            waiting: dict[Future[Result], Run] = {pool.submit(_work, run): run for run in runs}
            while waiting:
                with suppress(queue.Empty):
                    watcher.moved(*news.get(timeout=0.5))
                for future in [future for future in waiting if future.done()]:
                    yield waiting.pop(future), future.result()
        except BaseException:
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that start now use one thread: they read this when they start."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


_news: Any = None


def _begin(news: Any) -> None:
    global _news
    import torch

    torch.set_num_threads(1)
    _news = news
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A command that was killed can't stop its processes: they see that it has gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(run: Run) -> Result:
    told = 0

    def progress(share: float) -> None:
        nonlocal told
        if int(20 * share) > told:  # few words between processes
            told = int(20 * share)
            _news.put((run.title, share))

    return run.train(progress)
