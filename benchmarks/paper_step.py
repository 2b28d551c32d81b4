"""Where a step of `paper` goes: forward passes, privacy controller, extra noise, as CPU time, so that load does not matter.

python benchmarks/paper_step.py
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dpulr
from dpulr.mechanisms.paper import BoundPaper
from dpulr.mechanisms.paper_covariance import Covariance

STEPS, REPEATS = 40, 16


def timed(owner: Any, name: str, label: str, spent: dict[str, float]) -> None:
    """Count what a method takes, without what timed methods inside it take."""
    inner: Callable[..., Any] = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        before, start = spent["all timed"], time.thread_time()
        result = inner(*args, **kwargs)
        whole = time.thread_time() - start
        beside = threading.current_thread() is not threading.main_thread()
        own = whole if beside else whole - (spent["all timed"] - before)
        spent[label] += own
        spent["all timed"] += 0 if beside else own
        return result

    setattr(owner, name, method)


def main() -> None:
    torch.set_num_threads(1)
    train, _ = dpulr.data.load("mnist")
    spent: dict[str, float] = defaultdict(float)
    timed(BoundPaper, "estimate", "forward passes", spent)
    timed(BoundPaper, "_control", "controller", spent)
    timed(Covariance, "add_rows", "controller", spent)
    timed(Covariance, "add_matrix", "controller", spent)
    timed(Covariance, "decomposed", "eigenvectors", spent)
    timed(BoundPaper, "release", "extra noise", spent)
    print("milliseconds a step, K = 16, MLP, MNIST; forward passes include drawing the perturbations; eigenvectors run beside them")
    print("| batch | main thread | forward passes | covariance | extra noise | rest | eigenvectors, other thread |")
    print("|---|---|---|---|---|---|---|")
    for batch in (64, 200, 500):
        model = dpulr.models.mlp(seed=0)
        engine = dpulr.PrivacyEngine(
            model,
            torch.optim.Adam(model.parameters(), lr=0.01),
            train,
            nn.CrossEntropyLoss(reduction="none"),
            mechanism=dpulr.Paper(target_std=4.0, repeats=REPEATS, sigma=1.0, remedy="extra-noise"),
            batch_size=batch,
            steps=STEPS + 5,
            sampling="shuffle",
        )
        start = 0.0
        for inputs, targets in engine.batches():
            if engine.steps_taken == 5:
                spent.clear()
                start = time.thread_time()
            engine.step(inputs, targets)
        whole = time.thread_time() - start
        parts = [spent[name] for name in ("forward passes", "controller", "extra noise")]
        cells = [f"{1e3 * value / STEPS:.1f}" for value in (whole, *parts, whole - sum(parts))]
        print(f"| {batch} | {' | '.join(cells)} | {1e3 * spent['eigenvectors'] / STEPS:.1f} |")


if __name__ == "__main__":
    main()
