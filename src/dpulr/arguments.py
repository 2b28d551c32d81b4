"""The engine's arguments: each is checked here, before any data is touched, and refused in a plain sentence that names it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dpulr.mechanisms.base import Mechanism
from dpulr.model.batches import call_model, like, tile
from dpulr.model.row_independence import LossFunction
from dpulr.sampling import Records


def number(name: str, value: object, what: str, test: Callable[[float], bool]) -> float:
    """`value` if it is a finite number that passes the test."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not test(value):
        raise ValueError(f"{name} is {value!r}; it must be {what}.")
    return value


def positive(name: str, value: object) -> float:
    return number(name, value, "a positive number", lambda v: v > 0)


def whole(name: str, value: object, least: int = 1) -> int:
    return int(number(name, value, f"a whole number of at least {least}", lambda v: v >= least and v == int(v)))


def check_budget(
    target_epsilon: float | None, target_delta: float, noise_multiplier: float | None, *, mechanism: Mechanism
) -> None:
    if target_epsilon is not None and mechanism.guarantee != "certified":
        raise ValueError(
            f"{mechanism.name} has no certified epsilon: no target_epsilon can be met. Give noise_multiplier (the paper's sigma0)."
        )
    if target_epsilon is None and noise_multiplier is None and mechanism.guarantee != "certified" and not mechanism.owns_noise:
        raise ValueError(f"{mechanism.name} needs noise_multiplier (the paper's sigma0; 0 for plain ULR).")
    if target_epsilon is None and noise_multiplier is None and not mechanism.owns_noise:
        raise ValueError("give target_epsilon (the noise is then calibrated to it) or noise_multiplier.")
    if target_epsilon is not None:
        positive("target_epsilon", target_epsilon)
    if noise_multiplier is not None:
        number("noise_multiplier", noise_multiplier, "a number of at least 0", lambda v: v >= 0)
    if target_epsilon is not None and noise_multiplier == 0:
        raise ValueError("noise_multiplier is 0: without noise no target_epsilon can be met.")
    if isinstance(target_delta, bool) or not isinstance(target_delta, int | float) or not 0 < target_delta < 1:
        raise ValueError(f"target_delta is {target_delta}; it must lie between 0 and 1, well below 1 / (size of the data set).")


def check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.device:
    """The optimizer must hold just what is trained; all of it in one place and of one type."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"the optimizer must be a torch optimizer, not {type(optimizer).__name__}.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss several times a step, which nothing accounts for. Use SGD, Adam or the like.")
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in held:
        if parameter not in names:
            raise ValueError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's. Build it from "
                "model.parameters() of this very model."
            )
    trained = [parameter for parameter in names if parameter.requires_grad]
    left_out = [names[parameter] for parameter in trained if not any(parameter is other for other in held)]
    if left_out:
        raise ValueError(
            f"the optimizer does not hold {', '.join(map(repr, left_out[:3]))}, which would cost privacy and never move. Add it, "
            "or freeze it (requires_grad_(False))."
        )
    for parameter in trained:
        if parameter.is_floating_point() and parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"parameter '{names[parameter]}' is of type {parameter.dtype}: its rounding is coarser than the bound on a record. "
                "Train in float32 or float64."
            )
    kinds = {(parameter.device, parameter.dtype) for parameter in trained}
    if len(kinds) > 1:
        raise ValueError(f"all trained parameters must share one device and type; found {', '.join(sorted(map(str, kinds)))}.")
    return trained[0].device if trained else torch.device("cpu")


def batch_constants(
    size: int, batch_size: int | None, expected_batch_size: float | None, sample_rate: float | None
) -> tuple[float, float]:
    """Expected batch size (the denominator of the update) and sampling rate: public, whatever batch is drawn."""
    if batch_size is not None:
        if expected_batch_size is not None or sample_rate is not None:
            raise ValueError("give batch_size, or expected_batch_size and sample_rate, not both.")
        whole("batch_size", batch_size)
        if batch_size > size:
            raise ValueError(f"batch_size is {batch_size}, but the data set has only {size} records.")
        return float(batch_size), batch_size / size
    if expected_batch_size is None or sample_rate is None:
        raise ValueError("give batch_size; or, where the size of the data set is private, expected_batch_size and sample_rate.")
    number("sample_rate", sample_rate, "in (0, 1]", lambda v: 0 < v <= 1)
    positive("expected_batch_size", expected_batch_size)
    return float(expected_batch_size), float(sample_rate)


def smaller_neighbour(size: int, min_dataset_size: int | None) -> int:
    """The size of the smaller of two neighbouring data sets, which rejection is priced at."""
    if min_dataset_size is None:
        return size - 1
    whole("min_dataset_size", min_dataset_size)
    if not min_dataset_size < size:
        raise ValueError(
            f"min_dataset_size is {min_dataset_size}, but the data set has {size} records: without one of them it has {size - 1}. "
            "It must be at least 1 and no larger than that."
        )
    return int(min_dataset_size)


def planned_steps(epochs: float | None, steps: int | None, sample_rate: float, *, open_end: bool) -> int:
    if epochs is not None and steps is not None:
        raise ValueError("give epochs or steps, not both.")
    if steps is not None:
        return whole("steps", steps)
    if epochs is not None:
        positive("epochs", epochs)
        return max(1, math.ceil(epochs / sample_rate - 1e-9))
    if open_end:
        return _OPEN_END
    raise ValueError("give epochs or steps (or both target_epsilon and noise_multiplier: then training goes on until the target).")


def check_labels(model: nn.Module, loss_fn: LossFunction, records: Records, device: torch.device) -> None:
    """Whole-number targets must be such that the loss accepts them. Which labels exist is part of the schema, like shapes are."""
    targets = records.all_targets()
    if targets is None or targets.is_floating_point() or targets.dim() != 1:
        return
    labels = torch.unique(targets)
    inputs, _ = like(records.example, 1, torch.Generator().manual_seed(0), device)
    with torch.inference_mode():
        output = call_model(model, inputs)
        try:
            loss_fn(tile(output, len(labels)), labels.to(device))
        except (IndexError, RuntimeError, ValueError) as problem:
            raise ValueError(
                f"the loss function does not accept the data set's labels, from {int(labels.min())} to {int(labels.max())}, with "
                f"the model's output of shape {[tuple(leaf.shape[1:]) for leaf in pytree.tree_leaves(output)]} a record: {problem}"
            ) from problem


_OPEN_END = 10_000_000
