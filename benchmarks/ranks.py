"""Several processes of one core each: seconds per step, and the bytes of a step. docs/scale.md shows what came out.

    python -m benchmarks.ranks            # steps on 1, 2 and 4 processes, into reproduction/results/ranks.json: about ten minutes
    python -m benchmarks.ranks --headline # two jobs, 1 and 2 processes: two minutes, into no file
    python -m benchmarks.ranks --bytes    # what a step sends, beside Opacus: seconds, and a busy machine does not matter
    python -m reproduction pages          # fits the model of costs, and fills the page

Run the first on a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpulr
from benchmarks.peers import cifar_like, mnist_like
from reproduction import RESULTS

FILE = RESULTS / "ranks.json"
SIZES, WARM, ROUNDS = (1, 2, 4), 2, 3
LOSS = nn.CrossEntropyLoss(reduction="none")
MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[[], Any]]] = {
    "mlp": (dpulr.models.mlp, mnist_like),
    "resnet5": (dpulr.models.resnet5, cifar_like),
}
JOBS: dict[str, tuple[str, int, Any]] = {
    "mlp, batch 2,000, hidden-direction, K = 8": ("mlp", 2_000, dpulr.HiddenDirection(repeats=8)),
    "resnet5, batch 500, hidden-direction, K = 1": ("resnet5", 500, dpulr.HiddenDirection(repeats=1)),
    "mlp, batch 2,000, gradient": ("mlp", 2_000, dpulr.Gradient()),
    "mlp, batch 2,000, zeroth-order, K = 16": ("mlp", 2_000, dpulr.ZerothOrder(repeats=16)),
}
MESSAGES: dict[str, Any] = {
    "hidden-direction, K = 1": dpulr.HiddenDirection(repeats=1),
    "hidden-direction, K = 8": dpulr.HiddenDirection(repeats=8),
    "gradient": dpulr.Gradient(),
    "zeroth-order, K = 16": dpulr.ZerothOrder(repeats=16),
}


@cache
def data_of(name: str) -> Any:
    """Made once, before processes are forked."""
    return MODELS[name][1]()


# --- on a rank ------------------------------------------------------------------------------------------------------------
def made(name: str, batch: int, mechanism: Any, steps: int) -> dpulr.PrivacyEngine:
    make, _ = MODELS[name]
    model = make(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return dpulr.PrivacyEngine(
        model, optimizer, data_of(name), LOSS, mechanism=mechanism, batch_size=batch, steps=steps, noise_multiplier=2.0
    )


def seconds(job: str, steps: int, share: int) -> dict[str, float]:
    """Of a step on a batch of a `share`-th of the job's; what of it was communication and waiting; and how long it computed.

    The last two are means over all processes.
    """
    name, batch, mechanism = JOBS[job]
    engine = made(name, batch // share, mechanism, WARM + steps)
    _take(engine, WARM)
    began, computed, waited = time.perf_counter(), time.process_time(), engine.ranks.seconds
    _take(engine, steps)
    step = (time.perf_counter() - began) / steps
    own = (time.process_time() - computed) / steps, (engine.ranks.seconds - waited) / steps
    processor, communication = (sum(each) / engine.ranks.size for each in zip(*engine.ranks.gathered(own), strict=True))
    numbers = engine.fitted.size
    return {"batch": batch // share, "seconds": step, "communication": communication, "processor": processor, "numbers": numbers}


def _take(engine: dpulr.PrivacyEngine, steps: int) -> None:
    for inputs, targets in engine.batches(steps):
        engine.step(inputs, targets)


def sent(step: Callable[[], None]) -> dict[str, int]:
    """The collectives of one step: how many, and how many bytes are reduced or broadcast."""
    found = {"messages": 0, "bytes": 0}
    kept = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "gather", "reduce")}

    def counted(name: str) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **options: Any) -> Any:
            found["messages"] += 1
            found["bytes"] += tensor.numel() * tensor.element_size()
            return kept[name](tensor, *args, **options)

        return call

    for name in kept:
        setattr(dist, name, counted(name))
    step()
    for name, own in kept.items():
        setattr(dist, name, own)
    return found


def sent_by(name: str, mechanism: Any) -> dict[str, int]:
    engine = made(name, 64, mechanism, 2)

    def step() -> None:
        for batch in engine.batches(1):
            engine.step(*batch)

    step()
    return sent(step)


def sent_by_opacus(name: str) -> dict[str, int]:
    """A step of Opacus's own data-parallel training: its wrapper, its optimizer, its engine."""
    from opacus import PrivacyEngine
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as Wrapper

    make, _ = MODELS[name]
    model = Wrapper(make(seed=0))
    loader = torch.utils.data.DataLoader(data_of(name), batch_size=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=2.0, max_grad_norm=1.0
    )
    inputs, targets = next(iter(loader))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return sent(step)


# --- processes ------------------------------------------------------------------------------------------------------------
def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns on rank 0 of so many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results, cores = context.SimpleQueue(), sorted(os.sched_getaffinity(0))

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {cores[rank % len(cores)]})  # a core for each: else one process draws its noise on another's
        if size > 1:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        found = function(*args)
        if rank == 0:
            results.put(found)
        os._exit(0)

    processes = [context.Process(target=work, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if results.empty():
        raise SystemExit(f"{function.__name__}{args} has failed on {size} processes")
    return results.get()


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def measure_bytes() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (make, _) in MODELS.items():
        parameters = sum(parameter.numel() for parameter in make(seed=0).parameters())
        rows = {label: on_ranks(2, sent_by, name, mechanism) for label, mechanism in MESSAGES.items()}
        found[name] = {"parameters": parameters, "sent": rows | {"Opacus DPDDP": on_ranks(2, sent_by_opacus, name)}}
        print(name, found[name], flush=True)
    return found


def measure_seconds(jobs: list[str], sizes: list[int], steps: int, shares: list[int]) -> dict[str, Any]:
    """The best of three rounds; in each, all numbers of processes take their turn, so that a slow minute slows them all."""
    found: dict[str, Any] = {}
    for job, share in itertools.product(jobs, shares):
        data_of(JOBS[job][0])
        rounds = [{size: on_ranks(size, seconds, job, steps, share) | {"ranks": size} for size in sizes} for _ in range(ROUNDS)]
        for size in sizes:
            one = min((found[size] for found in rounds), key=lambda each: each["seconds"])
            found.setdefault(job, []).append(one)
            alone = min(found[sizes[0]]["seconds"] for found in rounds)
            print(
                f"{job}: {size} processes, batch {one['batch']}, {1 / one['seconds']:.3g} steps per second "
                f"({alone / one['seconds']:.2f} times {sizes[0]}; {size * one['processor'] / one['seconds']:.2f} cores computing)",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--headline", action="store_true", help="the first two jobs on 1 and 2 processes; print, and write no file")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS, metavar="JOB")
    parser.add_argument("--steps", type=int, default=10, help="per round; there are three, and the best counts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.headline:
        measure_seconds(list(JOBS)[:2], [1, 2], given.steps, [1])
        return
    known = read()
    if given.bytes:
        known["bytes"] = measure_bytes()
    else:
        timed = measure_seconds(given.jobs, list(SIZES), given.steps, [1, 4])
        known["seconds"] = known.get("seconds", {}) | timed
        known["cores"] = len(os.sched_getaffinity(0))
    FILE.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
