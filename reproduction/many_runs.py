"""Many runs of the paper's evaluation, side by side in processes of one thread each.

Each result is kept as soon as it is there: a stopped command loses only the runs under way.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dpulr.runs import training
from dpulr.runs.training import Recipe
from reproduction import paper_runs
from reproduction.paper_runs import PaperRun
from reproduction.results_file import add, found

Setting = PaperRun | Recipe


class Watcher(Protocol):
    """Whoever watches the runs."""

    def began(self, total: int, known: int) -> None: ...
    def moved(self, title: str, share: float) -> None: ...
    def done(self, result: dict[str, Any]) -> None: ...


def title(recipe: Mapping[str, Any]) -> str:
    """A few words for described settings."""
    if "mechanism" in recipe:
        return f"{recipe['mechanism']['name']} epsilon {recipe['target_epsilon']:.3f} seed {recipe['seed']}"
    noise = f" sigma0 {recipe['target_std']:g}" if recipe["target_std"] else ""
    repeats = f" K {recipe['repeats']}" if "repeats" in recipe else ""
    return f"{recipe['method']} {recipe['model']} batch {recipe['batch_size']}{noise}{repeats} seed {recipe['seed']}"


def run_all(settings: Sequence[Setting], file: Path, *, jobs: int, watcher: Watcher) -> list[dict[str, Any]]:
    """Run what the file lacks, `jobs` at a time, and return the results of all, in order."""
    missing = [setting for setting in settings if not found([setting], file)]
    watcher.began(len(settings), len(settings) - len(missing))

    def keep(result: dict[str, Any]) -> None:
        add(file, result)
        watcher.done(result)

    if min(jobs, len(missing)) > 1:
        _side_by_side(missing, min(jobs, len(missing)), watcher, keep)
    else:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for setting in missing:
                keep(_result(setting, partial(watcher.moved, title(setting.describe()))))
        finally:
            torch.set_num_threads(threads)
    return found(settings, file)


def cores() -> int:
    """How many processes can run without sharing a core."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _side_by_side(settings: Sequence[Setting], jobs: int, watcher: Watcher, keep: Callable[[dict[str, Any]], None]) -> None:
    context = multiprocessing.get_context("spawn")
    news: Any = context.Queue()
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read by a process when it starts
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(news,))
    try:
        waiting: set[Future[dict[str, Any]]] = {pool.submit(_work, setting) for setting in settings}
        while waiting:
            with suppress(queue.Empty):
                watcher.moved(*news.get(timeout=0.5))
            for future in [future for future in waiting if future.done()]:
                waiting.remove(future)
                keep(future.result())
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
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


def _work(setting: Setting) -> dict[str, Any]:
    return _result(setting, lambda share: _news.put((title(setting.describe()), share)))


def _result(setting: Setting, progress: Callable[[float], None]) -> dict[str, Any]:
    if isinstance(setting, PaperRun):
        return paper_runs.run(setting, progress)
    return training.run(setting, lambda taken, planned, _: progress(taken / planned))
