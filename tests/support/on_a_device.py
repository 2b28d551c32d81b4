"""Training on a device that is not the CPU, tried on a pretended one: the same numbers, and no tensor that hops between devices."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr import Gradient, HiddenDirection, ZerothOrder
from dpulr.errors import ModelRefused
from dpulr.mechanisms.base import FittedMechanism
from dpulr.randomness import Directions
from tests.support.pretend_device import DEVICE, OnDevice, PretendDevice, values
from tests.support.small_cli import SMALL, Ended

RECORDS = 60
TARGETS = torch.arange(RECORDS) % 3
LOSS = nn.CrossEntropyLoss(reduction="none")
FLAT, PICTURES, SEQUENCES = (4,), (2, 6, 6), (5, 4)
PUBLIC = {"dpulr/mechanisms/zeroth_order.py: gradients"}
"""Lines that may take a tensor off the device in a step: the few numbers that were released."""
OWNERS = {"dpulr/model/people.py: parts", "dpulr/model/people.py: part"}
"""... and who has how many rows, which came from the CPU."""


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(10, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.table((4 * x).abs().long() % 10)).mean(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.scale = nn.Linear(4, 4), nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(torch.tanh(self.layer(x)))) * self.scale


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Step(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))


def pictures() -> nn.Module:
    front = (nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.2))
    return nn.Sequential(*front, nn.Flatten(), nn.Linear(36, 3))


def steps() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), Step(), nn.Linear(6, 3))


PEOPLE = {"unit": [i // 3 for i in range(RECORDS)], "max_per_person": 2, "batch_size": 8}
QUICK: list[tuple[Any, Any, tuple[int, ...], dict[str, Any]]] = [
    (HiddenDirection(), mlp, FLAT, {}),
    (Gradient(), pictures, PICTURES, {}),
    ("gaussian", mlp, FLAT, {}),
    ("zeroth-order", mlp, FLAT, {}),
]
MORE: list[tuple[Any, Any, tuple[int, ...], dict[str, Any]]] = [
    (HiddenDirection(kappa="adaptive"), mlp, FLAT, {}),
    (HiddenDirection(kappa="auto", radius="auto"), steps, FLAT, {}),
    (HiddenDirection(exact="auto"), steps, FLAT, {}),
    (HiddenDirection(groups=2, antithetic=True), pictures, PICTURES, {}),
    (HiddenDirection(), pictures, PICTURES, {"memory_limit": 200_000}),
    (HiddenDirection(), mlp, FLAT, {"weights": dpulr.class_weights([1, 2, 3])}),
    (HiddenDirection(), mlp, FLAT, PEOPLE),
    (HiddenDirection(), Words, FLAT, {}),
    (HiddenDirection(), Tied, FLAT, {}),
    (HiddenDirection(), Attention, SEQUENCES, {}),
    (Gradient(max_grad_norm="adaptive"), mlp, FLAT, {}),
    (Gradient(clipping="normalised"), Words, FLAT, {}),
    (Gradient(), Tied, FLAT, {}),
    (Gradient(), Attention, SEQUENCES, {}),
    (Gradient(), mlp, FLAT, PEOPLE),
    (ZerothOrder.dp_aggzo(directions=4), mlp, FLAT, {}),
    (ZerothOrder.dp_zo(noise="laplace"), mlp, FLAT, {}),
    ("paper", mlp, FLAT, {"rejection_threshold": 5}),
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):
        yield


def engine_of(model: nn.Module, mechanism: Any, shape: tuple[int, ...], more: dict[str, Any]) -> dpulr.PrivacyEngine:
    inputs = torch.randn(RECORDS, *shape, generator=torch.Generator().manual_seed(1))
    settings = {"batch_size": 20, "steps": 2, "noise_multiplier": 1.0, "insecure_noise_seed": 3, **more}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return dpulr.PrivacyEngine(model, optimizer, TensorDataset(inputs, TARGETS), LOSS, mechanism=mechanism, **settings)


def trained(engine: dpulr.PrivacyEngine) -> list[Tensor]:
    """What the steps release, and the parameters after them."""
    torch.manual_seed(5)
    seen: list[Tensor] = []
    engine.on_release(lambda released: seen.append(released.values))
    for inputs, targets in engine.batches():
        engine.step(inputs, targets)
    return [*seen, *engine.model.parameters()]


@pytest.mark.parametrize(("mechanism", "make", "shape", "more"), CASES)
def test_a_step_stays_on_the_device(mechanism: Any, make: Any, shape: tuple[int, ...], more: dict[str, Any]) -> None:
    """Bit for bit what the CPU computes, as the pretended device computes there; and in a step no tensor comes back."""
    torch.manual_seed(0)
    expected = trained(engine_of(make(), mechanism, shape, more))
    torch.manual_seed(0)
    with PretendDevice() as device:
        engine = engine_of(make().to(DEVICE), mechanism, shape, more)
        engine.fitted.settle_rows()  # on synthetic records
        device.left.clear()
        found = trained(engine)
    assert set(device.left) <= PUBLIC | (OWNERS if "unit" in more else set())
    assert all(isinstance(tensor, OnDevice | nn.Parameter) and tensor.device == DEVICE for tensor in found)
    for here, there in zip(expected, found, strict=True):
        torch.testing.assert_close(values(there), here.detach(), rtol=0, atol=0)


def test_scores_and_states_on_the_device() -> None:
    model, data = mlp(), TensorDataset(torch.randn(RECORDS, 4), TARGETS)
    expected = dpulr.evaluate(model, data)
    with PretendDevice():
        engine = engine_of(model.to(DEVICE), "gradient", FLAT, {})
        assert dpulr.evaluate(engine.model, data) == expected
        assert -1 < engine.private_accuracy(data, epsilon=5.0) < 2
        trained(engine)
        state = engine.state_dict()
        engine.load_state_dict(state)
    assert all(tensor.device == DEVICE for tensor in state["model"].values())


@pytest.mark.slow
def test_a_run_on_the_device(tmp_path: Path, run_cli: Callable[..., Ended]) -> None:
    """Train, checkpoint, evaluate with and without noise, and resume."""
    folder, place = tmp_path / "run", ("--mechanism", "hidden-direction", "--device", DEVICE.type)
    with PretendDevice():
        ended = run_cli("train", *SMALL, *place, "--steps", 4, "--evaluations", 2, "--out", folder)
        assert ended.code == 0, ended.err
        assert run_cli("resume", folder, "--epsilon", 9, "--steps", 6).code == 0
        more = ("--holdout", 60, "--evaluation-epsilon", 0.5, "--evaluations", 1)
        assert run_cli("train", *SMALL, *place, *more, "--steps", 4, "--out", tmp_path / "noisy").code == 0
    assert run_cli("evaluate", folder).code == 0  # on the CPU again


def test_devices_that_can_not_train_are_named() -> None:
    with pytest.raises(ModelRefused, match="on the device 'meta', where parameters have no values"):
        engine_of(nn.Linear(4, 3, device="meta"), "gradient", FLAT, {})


# --- does the device notice? --------------------------------------------------------------------------------------------------
def test_what_an_accelerator_refuses_is_refused() -> None:
    with PretendDevice():
        there = torch.ones(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.ones(3)
        with pytest.raises(RuntimeError, match="generator"):
            torch.randn(3, device=DEVICE, generator=torch.Generator())
        with pytest.raises((RuntimeError, TypeError)):
            there.numpy()
        assert (there + 1).sum().item() == 6


@pytest.mark.parametrize("inference", [False, True])
def test_what_leaves_is_counted(inference: bool) -> None:
    with PretendDevice() as device, torch.inference_mode(inference):
        there = torch.ones(3, device=DEVICE)
        for leave in (lambda: there.cpu(), lambda: there.to("cpu"), lambda: there.tolist(), lambda: torch.zeros(3).copy_(there)):
            leave()
    assert device.left == Counter({"outside": 4})


def test_a_step_that_hops_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise added on the CPU; directions that were never moved."""
    privatise, normal = FittedMechanism.privatise, Directions.normal
    with PretendDevice() as device:
        engine = engine_of(mlp().to(DEVICE), HiddenDirection(), FLAT, {})
        device.left.clear()
        with monkeypatch.context() as patch:
            patch.setattr(FittedMechanism, "privatise", lambda own, total, noise: privatise(own, total.cpu().to(DEVICE), noise))
            trained(engine)
            assert device.left
        engine = engine_of(mlp().to(DEVICE), HiddenDirection(), FLAT, {})
        monkeypatch.setattr(Directions, "normal", lambda own, *shape: values(normal(own, *shape)))
        with pytest.raises(Exception, match="same device"):
            trained(engine)
