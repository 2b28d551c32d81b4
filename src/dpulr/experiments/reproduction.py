"""Many runs of the paper's evaluation, side by side in processes of one thread each, with one results file that resumes.

What the file holds is not run again. Each result is written as soon as it is there: a stopped command loses the runs under way.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dpulr.experiments.paper_runs import PaperRun, run, title

Results = dict[str, dict[str, Any]]


class Watcher(Protocol):
    """Whoever watches the runs."""

    def began(self, total: int, known: int) -> None: ...
    def moved(self, title: str, share: float) -> None: ...
    def done(self, result: dict[str, Any]) -> None: ...


def key(setting: PaperRun) -> str:
    return json.dumps(setting.describe(), sort_keys=True)


def load(file: Path) -> Results:
    """The results of a file by their settings."""
    stored = json.loads(file.read_text()) if file.exists() else []
    return {json.dumps(result["setting"], sort_keys=True): result for result in stored}


def found(settings: Sequence[PaperRun], file: Path) -> list[dict[str, Any]]:
    """The results of those settings that have been run."""
    known = load(file)
    return [known[key(setting)] for setting in settings if key(setting) in known]


def run_all(settings: Sequence[PaperRun], file: Path, *, jobs: int, watcher: Watcher) -> list[dict[str, Any]]:
    """Run what the file lacks, `jobs` at a time, and return the results of all, in order."""
    missing = [setting for setting in settings if key(setting) not in load(file)]
    watcher.began(len(settings), len(settings) - len(missing))

    def keep(result: dict[str, Any]) -> None:
        _add(file, result)
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


def _side_by_side(settings: Sequence[PaperRun], jobs: int, watcher: Watcher, keep: Callable[[dict[str, Any]], None]) -> None:
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


def _work(setting: PaperRun) -> dict[str, Any]:
    return _result(setting, lambda share: _news.put((title(setting.describe()), share)))


def _result(setting: PaperRun, progress: Callable[[float], None]) -> dict[str, Any]:
    return {**run(setting, progress), "machine": platform.machine(), "python": platform.python_version()}


def _add(file: Path, result: dict[str, Any]) -> None:
    """Read again what others may have written, add, write beside and rename: a reader never sees half a file."""
    known = load(file)
    known[json.dumps(result["setting"], sort_keys=True)] = result
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".part")
    draft.write_text(json.dumps(list(known.values()), indent=1) + "\n")
    draft.replace(file)
