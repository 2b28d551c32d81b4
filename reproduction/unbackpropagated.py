"""Models that backpropagation can't train, for `Settings.model`, and the same with somebody's stand-in for a gradient."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

import dpulr
from dpulr import models
from dpulr.models import LeakyIntegrateAndFire

__all__ = ["binarised", "boxed", "counting", "spiking", "spiking_surrogate", "straight_through", "unboxed"]


class _Heaviside(torch.autograd.Function):
    """1 from 0 on. Backwards: the slope of a fast sigmoid, which is not its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = slope / (1 + 25 * x.abs()).square()
        return found


class _Surrogate(LeakyIntegrateAndFire):
    """The same neurons; autograd is told of slopes that they don't have."""

    def forward(self, current: Tensor) -> Tensor:
        membrane = number = torch.zeros_like(current)
        for _ in range(self.steps):
            membrane = current + self.leak * membrane
            spike: Tensor = _Heaviside.apply(membrane - self.threshold)  # type: ignore[no-untyped-call]
            membrane = membrane * (1 - spike)
            number = number + spike
        return number


def spiking(seed: int, threshold: float = 10.0) -> nn.Module:
    """1,024 neurons. A high threshold goes with large weights: a learning rate that suits the last layer changes them slowly."""
    return models.spiking((784, 1024, 10), steps=5, threshold=threshold, window=7, seed=seed)


def spiking_surrogate(seed: int) -> nn.Module:
    """Its slopes are made for a threshold of 1."""
    model: Any = spiking(seed, threshold=1.0)
    neurons = model[2]
    model[2] = _Surrogate(neurons.steps, leak=neurons.leak, threshold=neurons.threshold, counted=True)
    return cast(nn.Module, model)


class Signs(nn.Module):
    """-1, 0 or 1."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sign(x)


class _StraightThrough(nn.Module):
    """The same; backwards as if nothing had been done, between -1 and 1."""

    def forward(self, x: Tensor) -> Tensor:
        bounded = x.clamp(-1, 1)
        return bounded + (torch.sign(x) - bounded).detach()


def binarised(seed: int, signs: type[nn.Module] = Signs, size: float = 10.0) -> nn.Module:
    """An MLP whose hidden layer says -1 or 1. `size` is that of its first weights: the larger, the more slowly signs change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, last = nn.Linear(784, 2048), nn.Linear(2048, 10)
        nn.init.normal_(first.weight, std=size / 28)
        nn.init.zeros_(first.bias)
        return nn.Sequential(nn.Flatten(), models.into_windows(first, 7), signs(), last)


def straight_through(seed: int) -> nn.Module:
    """As small as a slope asks for that ends at -1 and 1."""
    return binarised(seed, _StraightThrough, size=0.3)


def counting(seed: int) -> nn.Module:
    """An MLP for the 0-1 loss."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, last = nn.Linear(784, 512), nn.Linear(512, 10)
        nn.init.normal_(first.weight, std=1 / 28)
        nn.init.zeros_(first.bias)
        return nn.Sequential(nn.Flatten(), models.into_windows(first, 7), nn.GELU(), last)


def _matrix() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) / 8


def _around(box: nn.Module, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), box, nn.Linear(64, 10))


def boxed(seed: int) -> nn.Module:
    """tanh(x M) by ONNX Runtime, between two trained layers."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["records", 64]) for name in ("x", "y"))
    nodes = [helper.make_node("MatMul", ["x", "matrix"], ["h"]), helper.make_node("Tanh", ["h"], ["y"])]
    graph = helper.make_graph(nodes, "box", [x], [y], [numpy_helper.from_array(_matrix(), "matrix")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return _around(dpulr.BlackBox.onnx(session), seed)


class _Unboxed(nn.Module):
    """The same function in torch."""

    matrix: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.from_numpy(_matrix()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrix)


def unboxed(seed: int) -> nn.Module:
    return _around(_Unboxed(), seed)
