"""Canaries: the record whose presence the attacker wants to tell, by name or the user's own."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpulr.errors import InvalidArgument

Kind = Literal["ordinary", "mislabelled", "large", "feature", "crafted"]
KINDS: tuple[str, ...] = get_args(Kind)
CLASSES = 10
_SIDE = 7
_OWN_FEATURE = 0  # the corner, where no digit has ink


@lru_cache(maxsize=1)
def digits(count: int = 65) -> tuple[Tensor, Tensor]:
    """Small digits: MNIST averaged to 7 x 7, values from 0 to 1."""
    from dpulr import data

    train, _ = data.load("mnist")
    inputs, targets = train[:count]
    if len(targets) < count:
        raise InvalidArgument(f"{count:,} digits are needed, and MNIST has {len(targets):,}. Take fewer canaries.")
    ink = (inputs.reshape(count, 1, 28, 28) * 0.3 + 0.1).clamp(0, 1)
    return functional.avg_pool2d(ink, 28 // _SIDE).flatten(1), targets


def softmax_regression() -> nn.Module:
    """One layer on the small digits; two are `perceptron`."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_SIDE**2, CLASSES))


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_SIDE**2, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def make(kind: str, ordinary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The canary of this kind, made from an ordinary record of the data."""
    inputs, target = ordinary
    if kind == "ordinary":
        return inputs, target
    if kind == "mislabelled":
        return inputs, (target + 1) % CLASSES
    if kind == "large":
        return 100 * inputs, (target + 1) % CLASSES
    if kind == "feature":
        alone = torch.zeros_like(inputs)
        alone.view(-1)[_OWN_FEATURE] = 10.0
        return alone, target
    raise InvalidArgument(f"canary is {kind!r}; it must be one of {', '.join(KINDS)}, or a file (.pt, .npz) that holds x and y.")


def load(path: Path) -> tuple[Tensor, Tensor]:
    """A canary from a file: x and y in an .npz, or in a dict or pair saved by torch.save. 28 x 28 numbers are averaged to 7 x 7."""
    if not path.exists():
        raise InvalidArgument(f"canary {str(path)!r} is neither a kind ({', '.join(KINDS)}) nor a file.")
    try:
        if path.suffix == ".npz":
            with np.load(path) as found:
                inputs, target = torch.from_numpy(found["x"]), torch.as_tensor(found["y"])
        else:
            inputs, target = _pair(torch.load(path, weights_only=True))
    except (KeyError, ValueError, TypeError, OSError, RuntimeError, EOFError) as problem:
        raise InvalidArgument(f"{path} holds no canary: it needs x and y, in an .npz or by torch.save. ({problem})") from problem
    except Exception as problem:  # unpickling fails in many ways
        raise InvalidArgument(f"{path} can't be read as a canary: {type(problem).__name__}.") from problem
    inputs = inputs.float()
    if not inputs.isfinite().all():
        raise InvalidArgument(f"{path} holds no canary: x has values that are not finite.")
    if inputs.numel() == 28 * 28:
        inputs = functional.avg_pool2d(inputs.view(1, 1, 28, 28), 28 // _SIDE).flatten()
    return inputs.squeeze(0) if inputs.dim() > 1 and inputs.shape[0] == 1 else inputs, target.squeeze()


def _pair(found: Any) -> tuple[Tensor, Tensor]:
    inputs, target = (found["x"], found["y"]) if isinstance(found, dict) else found
    return torch.as_tensor(inputs), torch.as_tensor(target)
