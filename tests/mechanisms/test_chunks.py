"""A step stays below the memory limit that the user sets, whatever the number of repeats."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.mechanisms.chunks import Chunks
from tests.support.core import engine
from tests.support.memory import LiveBytes

MB = 2**20


def convolutions() -> nn.Module:
    layers = (nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2), nn.Flatten(), nn.Linear(72, 10))
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "linear": (lambda: dpulr.models.mlp((64, 64, 32, 10)), (16, 64), {}),
    "linear, weights": (lambda: dpulr.models.mlp((16, 16, 10)), (4, 16), {"space": "weight"}),
    "linear, one-sided": (lambda: dpulr.models.mlp((64, 64, 32, 10)), (16, 64), {"estimator": "likelihood-ratio"}),
    "convolutions": (convolutions, (2, 1, 8, 8), {}),
    "convolutions, outputs": (convolutions, (2, 1, 8, 8), {"space": "output"}),
    "any module": (lambda: nn.Sequential(nn.Linear(8, 8), nn.PReLU(8), nn.Linear(8, 10)), (16, 8), {"space": "weight"}),
}


def peak_of_a_step(private: dpulr.PrivacyEngine, *, with_trials: bool = False) -> int:
    """Beside what was there before: model, batch and gradients. What is tried before the first step takes long to count."""
    batch = next(private.batches())
    if not with_trials:
        private.fitted.settle_rows()
    with LiveBytes() as live:
        private.step(*batch)
    return live.peak


def limited(name: str, limit: int, dtype: torch.dtype = torch.float32) -> dpulr.PrivacyEngine:
    make, shape, settings = MODELS[name]
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(shape, dtype=dtype), torch.zeros(shape[0]).long())
    mechanism = dpulr.Gaussian(repeats=1024, **settings)
    return engine(make().to(dtype), data, mechanism=mechanism, batch_size=shape[0], memory_limit=limit)


def peak(name: str, limit: int, dtype: torch.dtype = torch.float32) -> int:
    return peak_of_a_step(limited(name, limit, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_with_1024_repeats_stays_below_the_limit(name: str, dtype: torch.dtype) -> None:
    assert peak(name, 2 * MB, dtype) < 2 * MB
    assert 1.5 * MB < peak(name, 6 * MB, dtype) < 6 * MB  # the room is used


@pytest.mark.parametrize("name", ["linear", pytest.param("convolutions", marks=pytest.mark.slow)])
def test_a_wrong_chunking_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chunks, "repeats", lambda self, needed, records, repeats: iter([repeats]))
    assert peak(name, 2 * MB) > 2 * MB


def test_large_batches_are_split_too() -> None:
    """The clean pass of 3,000 records, and one repeat of them, would not fit."""
    model, data = dpulr.models.mlp((64, 64, 32, 10)), TensorDataset(torch.rand(3000, 64), torch.zeros(3000).long())
    assert peak_of_a_step(engine(model, data, batch_size=3000, memory_limit=2 * MB), with_trials=True) < 2 * MB


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, settings, marks=() if name == "linear" and not settings else pytest.mark.slow)
        for name in ("linear", "convolutions", "any module")
        for settings in ({}, {"antithetic": True}, {"groups": 2})
    ]
    + [
        pytest.param(name, settings, marks=pytest.mark.slow)
        for name in ("linear", "convolutions", "any module")
        for settings in ({"repeats": 64}, {"subspace": None})
    ],
    ids=str,
)
def test_passes_for_all_layers_at_once_stay_below_the_limit(name: str, settings: dict[str, Any]) -> None:
    make, shape, _ = MODELS[name]
    torch.manual_seed(0)
    model, data = make(), TensorDataset(torch.rand(200, *shape[1:]), torch.zeros(200).long())
    for limit in (2 * MB, 6 * MB):
        mechanism = dpulr.HiddenDirection(**settings)
        assert peak_of_a_step(engine(model, data, mechanism=mechanism, batch_size=200, memory_limit=limit)) < limit


WIDE = """
import torch, dpulr
from torch import nn
from torch.utils.data import TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(3_200, 3_200), nn.GELU(), nn.Linear(3_200, 10))  # ten million parameters in one layer
def highest_after_a_step(mechanism, batch):
    data = TensorDataset(torch.randn(batch, 3_200), torch.randint(0, 10, (batch,)))
    engine = dpulr.PrivacyEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.CrossEntropyLoss(reduction="none"),
                                 mechanism=mechanism, batch_size=batch, steps=1, noise_multiplier=1.0)
    before = model[0].weight[0].clone()
    for x, y in engine.batches():
        engine.step(x, y)
    assert bool(torch.isfinite(model[0].weight).all()) and not torch.equal(model[0].weight[0], before)
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
for mechanism in (dpulr.HiddenDirection(), dpulr.Gaussian(repeats=1)):
    few = highest_after_a_step(mechanism, 20)
    print(highest_after_a_step(mechanism, 200) - few)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc has the peak on Linux only")
def test_a_layer_of_ten_million_parameters_has_no_gradient_per_record() -> None:
    """A gradient for each of 180 more records would take 7,000 MB. Their activations, in all passes, take less than 100."""
    found = subprocess.run([sys.executable, "-c", WIDE], capture_output=True, text=True, check=True)
    for growth in found.stdout.split():
        assert float(growth) < 500


FREED_AT_ONCE = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
RESIDENT = """
from tests.mechanisms.test_chunks import MB, limited
def highest():  # of this process alone: getrusage hands down the peak of the process that started it
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
def step(limit):
    private = limited({name!r}, limit * MB)
    private.step(*next(private.batches()))
step(2)  # warm up: libraries, threads, allocator
before = highest()
step({limit})
print((highest() - before) / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc has the peak on Linux only")
@pytest.mark.parametrize("name", ["linear", "convolutions"])
def test_resident_memory_agrees(name: str, request: pytest.FixtureRequest) -> None:
    """What the operating system sees of set-up, trials and a step, kernels' work space included. What is freed goes back."""
    program = RESIDENT.format(name=name, limit=48)
    command, where = [sys.executable, "-W", "ignore", "-c", program], request.config.rootpath
    found = subprocess.run(command, cwd=where, env=os.environ | FREED_AT_ONCE, capture_output=True, text=True, check=True)
    assert 1 < float(found.stdout) < 48, found.stdout


KEPT = """
import resource, torch
from dpulr.allocator import keep_freed
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [torch.ones(5 * 2**20) for _ in range(4)]  # 20 MiB each
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first = [faults() for _ in range(3)][-1]
keep_freed(2**27)
print(first, [faults() for _ in range(3)][-1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not platform.libc_ver()[0], reason="glibc alone")
def test_what_a_pass_has_freed_is_kept_unless_the_environment_says_otherwise() -> None:
    command = [sys.executable, "-W", "ignore", "-c", KEPT]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    for environment, kept in ((plain, True), (plain | FREED_AT_ONCE, False)):
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        first, then = map(int, found.stdout.split())
        assert first > 100
        assert (then < first / 10) is kept
