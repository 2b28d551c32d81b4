"""Checkpoints: one safetensors file with weights, optimizer state and a hash over all of it. No pickle, no random state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dpulr.errors import PrivacyRefusal, RunError
from dpulr.files import replace_file

CHECKPOINT, MODEL = "checkpoint.safetensors", "model.safetensors"


def write(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write tensors and a JSON state beside them, at once or not at all."""
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps(state, sort_keys=True)
    replace_file(path, save(held, {"format": "pt", "state": text, "sha256": _digest(held, text)}))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write` wrote. Anything else is refused by name."""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            # the file is no dict: it has keys, but can't be iterated over
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = about["state"]
        whole = about["sha256"] == _digest(tensors, text)
        state = json.loads(text)
    except FileNotFoundError:
        raise RunError(f"there is no {path.name} in {path.parent}.") from None
    except Exception as problem:
        raise RunError(f"{path} is damaged or not a file of dpulr: {problem}") from problem
    if not whole or not isinstance(state, dict):
        raise RunError(f"{path} is damaged: its hash does not fit its content.")
    return tensors, state


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# --- training state -----------------------------------------------------------------------------------------------------
def save_training(folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, about: Mapping[str, Any]) -> None:
    """The state to go on from. `about` ties it to its run: run, steps, ledger entry and hash."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    optimizer_state = optimizer.state_dict()
    plain: dict[str, dict[str, Any]] = {}
    for index, values in optimizer_state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}"] = value
            else:
                plain.setdefault(str(index), {})[name] = value
    write(folder / CHECKPOINT, tensors, {**about, "optimizer": plain, "groups": optimizer_state["param_groups"]})


def load_training(folder: Path, *, run: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put the last checkpoint's state into place; return what was saved about it, or nothing if there is no checkpoint yet."""
    if not (folder / CHECKPOINT).exists():
        return {}
    try:
        tensors, about = read(folder / CHECKPOINT)
    except RunError as damaged:
        raise RunError(
            f"{damaged} Put back a whole one, or remove it to go on from the initial weights; what was spent stays spent."
        ) from damaged
    if about.get("run") != run:
        raise PrivacyRefusal(f"{folder / CHECKPOINT} belongs to another run.")
    try:
        model.load_state_dict(_part(tensors, "model."))
        state: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in about["optimizer"].items()}
        for name, tensor in _part(tensors, "optimizer.").items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": about["groups"]})
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as problem:
        raise RunError(f"{folder / CHECKPOINT} does not fit this model: {problem}") from problem
    return about


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def load_model(folder: Path, model: nn.Module) -> dict[str, Any]:
    """Put the weights of a finished run, or else of its last checkpoint, into `model`."""
    if (folder / MODEL).exists():
        tensors, about = read(folder / MODEL)
    else:
        tensors, about = read(folder / CHECKPOINT)
        tensors = _part(tensors, "model.")
    try:
        model.load_state_dict(tensors)
    except (RuntimeError, KeyError) as problem:
        raise RunError(f"the weights in {folder} do not fit this model: {problem}") from problem
    return about
