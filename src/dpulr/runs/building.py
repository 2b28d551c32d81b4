"""From settings to objects: data, model and mechanism, by name or from a user's own module."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from dpulr import data, mechanisms, models
from dpulr.mechanisms import Mechanism
from dpulr.runs.errors import UsageError
from dpulr.runs.settings import Settings
from dpulr.runs.training import Recipe

_MECHANISMS: dict[str, type[Mechanism]] = {
    kind.name: kind
    for kind in vars(mechanisms).values()
    if isinstance(kind, type) and issubclass(kind, Mechanism) and kind is not Mechanism
}
_MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": models.mlp, "resnet5": models.resnet5}
_MODEL_OF = {"mnist": "mlp", "fashion-mnist": "mlp", "cifar10": "resnet5"}


def recipe(settings: Settings) -> Recipe:
    """The recipe that the training loop takes."""
    return Recipe(
        mechanism=mechanism(settings),
        dataset=settings.dataset,
        model=settings.model,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        target_epsilon=settings.target_epsilon,
        target_delta=settings.target_delta,
        noise_multiplier=settings.noise_multiplier,
        learning_rate=settings.learning_rate,
        momentum=settings.momentum,
        average=settings.average,
        seed=settings.seed,
        insecure_noise_seed=settings.insecure_noise_seed,
        steps=settings.steps,
        sampling=settings.sampling,  # type: ignore[arg-type]
        rejection_threshold=settings.rejection_threshold,  # type: ignore[arg-type]
        min_dataset_size=settings.min_dataset_size,
    )


def mechanism(settings: Settings) -> Mechanism:
    kind = _MECHANISMS.get(settings.mechanism)
    if kind is None:
        raise UsageError(f"mechanism is {settings.mechanism!r}; it must be one of {', '.join(_MECHANISMS)}.")
    options = dict(settings.mechanism_options)
    known = {item.name: item.default for item in fields(kind)}  # type: ignore[arg-type]
    if "repeats" in known and settings.repeats is not None:
        options.setdefault("repeats", settings.repeats)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UsageError(f"{settings.mechanism} has no setting {unknown[0]!r}; it has {', '.join(sorted(known))}.")
    for name, value in options.items():
        if isinstance(value, list):
            options[name] = tuple(value)
        elif value is None and isinstance(known[name], str):
            options[name] = "none"  # the word, where a setting takes words
    try:
        return kind(**options)
    except (TypeError, ValueError) as problem:
        raise UsageError(str(problem)) from problem


def load_data(settings: Settings) -> tuple[Any, Any]:
    """Training and test set."""
    if ":" not in settings.dataset:
        try:
            return data.load(settings.dataset)
        except (ValueError, OSError) as problem:
            raise UsageError(str(problem)) from problem
    pair = _call(settings.dataset, {})
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UsageError(f"{settings.dataset} must return two data sets, (train, test), not {type(pair).__name__}.")
    return pair[0], pair[1]


def make_model(settings: Settings) -> nn.Module:
    """The model with its initial weights. A user's function gets `seed` if it has such a parameter."""
    name = settings.model
    if name == "auto":
        name = _MODEL_OF.get(settings.dataset, "")
        if not name:
            raise UsageError(f"which model fits {settings.dataset} can't be told: give --model.")
    if ":" not in name:
        if name not in _MODELS:
            raise UsageError(f"model is {name!r}; it must be one of {', '.join(_MODELS)}, or package.module:function.")
        return _MODELS[name](seed=settings.seed)
    model = _call(name, {"seed": settings.seed})
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name} must return a torch.nn.Module, not {type(model).__name__}.")
    return model


def _call(path: str, offered: Mapping[str, Any]) -> Any:
    """Call package.module:function with those of the offered arguments that it takes. The working folder is searched first."""
    module_name, _, function_name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as problem:
        raise UsageError(f"{module_name!r} can't be imported: {_named(problem)}") from problem
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"the module {module_name!r} has no function {function_name!r}.")
    try:
        taken = inspect.signature(function).parameters
        return function(**{name: value for name, value in offered.items() if name in taken})
    except Exception as problem:
        raise UsageError(f"{path} failed: {_named(problem)}") from problem


def _named(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".rstrip(": ")
