"""Models that nobody here wrote: sites, set-up, and a step over a plain pass. `python -m benchmarks.transformers [NAME ...]`

A step is one of hidden-direction with one direction and one-sided differences, whose bound is 1 + L/2 passes for L sites. Seconds
are those of the processor, so that other processes on the machine don't count; batches have 16 records.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch.utils.data import Dataset

import dpulr
from benchmarks.zoo import MODELS, Case
from dpulr.model.batches import call_model
from dpulr.model.replay import TracedPasses
from dpulr.parts.computing import computing
from dpulr.randomness import RandomSource
from reproduction.pages import table

BATCH, RECORDS, ROUNDS = 16, 64, 5


class Records(Dataset[tuple[object, object]]):
    def __init__(self, case: Case) -> None:
        self.inputs, self.targets = case.batch(RECORDS)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[object, object]:
        return {name: values[index] for name, values in self.inputs.items()}, self.targets[index]


def seconds(run: Callable[[], object]) -> float:
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return statistics.median(found)


def measured(name: str) -> list[str]:
    case = MODELS[name]
    model = case.make()
    trained = [p for p in model.parameters() if p.requires_grad]
    start = time.process_time()
    engine = dpulr.PrivacyEngine(
        model,
        torch.optim.SGD(trained, lr=0.01),
        Records(case),
        case.loss_fn,
        mechanism=dpulr.HiddenDirection(repeats=1, antithetic=False),
        sample_rate=BATCH / RECORDS,
        expected_batch_size=BATCH,
        steps=100,
        noise_multiplier=1.0,
    )
    set_up = time.process_time() - start
    inputs, targets = case.batch(BATCH)

    def plain() -> None:
        with torch.inference_mode():
            case.loss_fn(call_model(model, inputs), targets)

    forward, public = engine.fitted, engine.fitted.draw_public(0)

    def step() -> None:
        with computing(engine.forward, RandomSource()):
            forward.sum_of_bounded_signals((inputs, targets), public, engine._directions)

    plain()
    step()
    ratio = seconds(step) / seconds(plain)
    owners = sum(any(p.requires_grad for p in m.parameters(recurse=False)) for m in model.modules())
    sites = len(engine.forward.sites)
    way = "batches" if isinstance(engine.forward.passes, TracedPasses) else type(engine.forward.passes).__name__
    bound = 1 + sites / 2
    return [name, str(owners), str(sites), way, f"{set_up:.1f}", f"{ratio:.1f}", f"{bound:.1f}", f"{ratio / bound:.2f}"]


def main(names: list[str]) -> None:
    head = [
        "model",
        "layers",
        "sites",
        "runs in",
        "set-up, s",
        "step over pass",
        "bound 1 + L/2",
        "over the bound",
    ]
    with warnings.catch_warnings(action="ignore"):
        lines = table(head, [head]).splitlines()
        print(lines[0], lines[1], sep="\n")
        for name in names or MODELS:
            print(table(head, [measured(name)]).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
