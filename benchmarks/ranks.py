"""Steps per second on 1, 2, 4 ... processes of one thread each: `python -m benchmarks.ranks`. docs/scale.md shows what came out.

`--jobs mlp resnet5 zeroth-order` and `--ranks 1 2` choose; `--json FILE` keeps the numbers; `--predict FILE` fits the cost model to
them and says what it expects of more processes on a network of 10 Gbit/s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dpulr

JOBS: dict[str, dict[str, Any]] = {
    "mlp": {"model": "mlp", "data": "mnist", "batch_size": 2_000, "mechanism": dpulr.HiddenDirection(repeats=8)},
    "resnet5": {"model": "resnet5", "data": "cifar-like", "batch_size": 500, "mechanism": dpulr.HiddenDirection(repeats=1)},
    "mlp-gradient": {"model": "mlp", "data": "mnist", "batch_size": 2_000, "mechanism": "gradient"},
    "zeroth-order": {"model": "mlp", "data": "mnist", "batch_size": 2_000, "mechanism": dpulr.ZerothOrder(repeats=16)},
}
WARM, ROUNDS = 2, 3
NETWORK = 10e9 / 8  # bytes per second
NETWORK_LATENCY = 50e-6


def measure(rank: int, size: int, port: int, name: str, steps: int) -> dict[str, float]:
    """Seconds per step, the best of three rounds, and what of it was communication."""
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    job = JOBS[name]
    model = dpulr.models.mlp(seed=0) if job["model"] == "mlp" else dpulr.models.resnet5(seed=0)
    engine = dpulr.PrivacyEngine(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        dpulr.data.load("mnist")[0] if job["data"] == "mnist" else _pictures(),
        nn.CrossEntropyLoss(reduction="none"),
        mechanism=job["mechanism"],
        batch_size=job["batch_size"],
        steps=WARM + ROUNDS * steps,
        noise_multiplier=2.0,
    )
    taken = _timed(engine, WARM)
    taken = min((_timed(engine, steps) for _ in range(ROUNDS)), key=lambda pair: pair[0])
    return {
        "seconds": taken[0],
        "communication": taken[1],
        "numbers": engine.fitted.size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch_size": job["batch_size"],
    }


def _timed(engine: dpulr.PrivacyEngine, steps: int) -> tuple[float, float]:
    began, waited = time.perf_counter(), engine.ranks.seconds
    for inputs, targets in engine.batches(steps):
        engine.step(inputs, targets)
    return (time.perf_counter() - began) / steps, (engine.ranks.seconds - waited) / steps


def _pictures() -> torch.utils.data.TensorDataset:
    """As many as CIFAR-10 has, of its shape; what is in them makes no difference to the time."""
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        torch.rand(50_000, 3, 32, 32, generator=generator), torch.randint(10, (50_000,), generator=generator)
    )


def run(name: str, size: int, steps: int) -> dict[str, float]:
    """On so many processes; what rank 0 has measured."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = context.SimpleQueue()

    def work(rank: int) -> None:
        found = measure(rank, size, port, name, steps)
        if rank == 0:
            results.put(found)
        sys.stdout.flush()
        os._exit(0)

    processes = [context.Process(target=work, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    found: dict[str, float] = results.get()
    for process in processes:
        process.join()
    return found


def fit(found: dict[str, dict[str, float]]) -> tuple[float, float, float]:
    """Fixed seconds, seconds per record, and latency of the three messages of a step: least squares on all sizes of one job."""
    rows, seconds = [], []
    for size, one in found.items():
        ranks = int(size)
        rows.append([1.0, one["batch_size"] / ranks, 0.0 if ranks == 1 else ranks.bit_length() - 1])
        seconds.append(one["seconds"])
    solution = torch.linalg.lstsq(torch.tensor(rows, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64).unsqueeze(1))
    fixed, record, latency = solution.solution.squeeze(1).clamp(min=0).tolist()
    return fixed, record, latency


def predicted(found: dict[str, dict[str, float]], ranks: int) -> tuple[float, float]:
    """Seconds per step on a network, and efficiency against one process, by the model of docs/scale.md."""
    fixed, record, _ = fit(found)
    one = found["1"]
    rounds = 3 * 2 * NETWORK_LATENCY * (ranks - 1).bit_length()
    wire = 2 * (ranks - 1) / ranks * 8 * one["numbers"] / NETWORK + 2 * (ranks - 1) * NETWORK_LATENCY
    seconds = fixed + record * one["batch_size"] / ranks + rounds + wire
    return seconds, one["seconds"] / (ranks * seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", nargs="+", default=["mlp", "resnet5"], choices=JOBS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--predict", type=Path)
    given = parser.parse_args()
    if given.predict:
        _show_predictions(json.loads(given.predict.read_text()))
        return
    found: dict[str, dict[str, dict[str, float]]] = {}
    for job in given.jobs:
        for size in given.ranks:
            one = run(job, size, given.steps)
            found.setdefault(job, {})[str(size)] = one
            first = found[job].get("1", one)["seconds"]
            sent = 2 * (size - 1) / size * 8 * one["numbers"]
            print(
                f"{job}: {size} processes, {1 / one['seconds']:.2f} steps per second, {first / one['seconds']:.2f} times one, "
                f"{one['communication'] / one['seconds']:.1%} communication and waiting, {sent:,.0f} bytes per step and rank; "
                f"a full gradient in float32 would be {2 * (size - 1) / size * 4 * one['parameters']:,.0f}",
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


def _show_predictions(measured: dict[str, dict[str, dict[str, float]]]) -> None:
    for job, found in measured.items():
        fixed, record, latency = fit(found)
        print(f"{job}: {1e3 * fixed:.2f} ms fixed, {1e6 * record:.2f} us per record, {1e3 * latency:.2f} ms per doubling of ranks")
        for ranks in (10, 32, 100, 256, 1000):
            seconds, efficiency = predicted(found, ranks)
            print(f"  {ranks} ranks: {1 / seconds:,.0f} steps per second, efficiency {efficiency:.0%}")


if __name__ == "__main__":
    main()
