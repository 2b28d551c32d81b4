"""What settings name, as objects: data, model and mechanism, the package's or a user's; and the model that a run has trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset

from dpulr import data, features, mechanisms, models
from dpulr.data.table_schema import TableSchema
from dpulr.data.tables import KINDS, read_table
from dpulr.data.texts import read_texts, tokenizer_of
from dpulr.errors import PrivacyRefusal, RunError, UsageError
from dpulr.language import text_classifier
from dpulr.mechanisms import Mechanism
from dpulr.runs import checkpoint
from dpulr.runs.folder import open_config
from dpulr.runs.settings import IN_PROGRAM, Settings
from dpulr.scores import Scores, score
from dpulr.temperature import tempered
from dpulr.user_code import named, user_module

_MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": models.mlp, "resnet5": models.resnet5}
_TABLE_MODELS: dict[str, tuple[int, ...]] = {"auto": (), "mlp": (64, 32)}  # their hidden layers
_HF = "hf:"
_MODEL_OF = {"mnist": "mlp", "fashion-mnist": "mlp", "cifar10": "resnet5"}


def load_data(settings: Settings) -> tuple[Any, Any]:
    """Training and test set; with a holdout, both from the training set."""
    if settings.dataset.startswith(IN_PROGRAM):
        raise UsageError("this run is a program's own (dpulr.runs.record): only that program has its data, and goes on with it.")
    if settings.text is not None:
        train, test = _texts(settings)
    elif is_table(settings):
        train, test = _tables(settings)
    elif settings.features is not None:
        train, test = _features(settings.dataset, settings.features)
    elif ":" not in settings.dataset:
        train, test = data.load(settings.dataset)
    else:
        pair = _call(settings.dataset, {})
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UsageError(f"{settings.dataset} must return two data sets, (train, test), not {type(pair).__name__}.")
        train, test = pair
    if not settings.holdout:
        return train, test
    if settings.test is not None:
        raise UsageError("give --holdout or --test, not both.")
    border = len(train) - settings.holdout
    if border < 1:
        raise UsageError(f"holdout is {settings.holdout}, but there are only {len(train)} training records.")
    return Subset(train, range(border)), Subset(train, range(border, len(train)))


def is_table(settings: Settings) -> bool:
    return settings.text is None and _is_file(settings)


def _is_file(settings: Settings) -> bool:
    return settings.dataset.partition(":")[0] in KINDS and ":" in settings.dataset


def table_schema(settings: Settings) -> TableSchema:
    if settings.schema is None:
        kind, _, file = settings.dataset.partition(":")
        raise UsageError(
            f"{kind}: needs --schema, a file that says what everybody may know of the columns. 'dpulr data schema {file}' "
            "drafts one."
        )
    return TableSchema.read(settings.schema, settings.label)


def class_names(settings: Settings) -> list[str]:
    """What the classes are called, where the settings say so."""
    if settings.text is not None:
        return _labels(settings)
    return list(table_schema(settings).target.categories) if is_table(settings) else []


def _texts(settings: Settings) -> tuple[Any, Any]:
    if not _is_file(settings) or settings.label is None or not settings.model.startswith(_HF):
        raise UsageError("--text needs --dataset csv:FILE (or parquet:FILE), --label COLUMN and --model hf:FOLDER.")
    read = partial(
        read_texts,
        text=settings.text or "",
        label=settings.label,
        classes=_labels(settings),
        tokenizer=tokenizer_of(settings.model.removeprefix(_HF)),
        length=settings.tokens,
    )
    return read(settings.dataset.partition(":")[2]), None if settings.test is None else read(settings.test)


def _labels(settings: Settings) -> list[str]:
    return [label.strip() for label in settings.labels.split(",")]


def _tables(settings: Settings) -> tuple[Any, Any]:
    kind, _, file = settings.dataset.partition(":")
    schema = table_schema(settings)
    test = None if settings.test is None else read_table(settings.test, schema)
    return read_table(file, schema, kind=kind), test


@lru_cache(maxsize=1)
def _features(dataset: str, extractor: str) -> tuple[Any, Any]:
    """Kept, because data and model are both made from them: their hash is checked once."""
    if ":" in dataset:
        raise UsageError(f"features are made of data sets that are known by name, not of {dataset}: use dpulr.features.compute.")
    return features.load(dataset, extractor)


def make_model(settings: Settings) -> nn.Module:
    """The model with its initial weights. A user's function gets `seed` if it has such a parameter."""
    name = settings.model
    if name.startswith(_HF):
        classes = len(_labels(settings))
        return text_classifier(name.removeprefix(_HF), classes, trained=settings.trained, seed=settings.seed)
    if is_table(settings) and name in _TABLE_MODELS:
        schema = table_schema(settings)
        sizes = [len(schema.features), *_TABLE_MODELS[name], len(schema.target.categories) or 1]
        return models.mlp(sizes, seed=settings.seed)
    if name == "auto" and settings.features is not None:
        return features.head(_features(settings.dataset, settings.features)[0])
    if name == "auto":
        name = _MODEL_OF.get(settings.dataset, "")
        if not name:
            raise UsageError(
                f"which model fits {settings.dataset} can't be told, as the number of classes must not come from the data: give "
                "--model package.module:function."
            )
    if ":" not in name:
        if name not in _MODELS:
            raise UsageError(f"model is {name!r}; it must be one of {', '.join(_MODELS)}, or package.module:function.")
        return _MODELS[name](seed=settings.seed)
    model = _call(name, {"seed": settings.seed})
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name} must return a torch.nn.Module, not {type(model).__name__}.")
    return model


def make_mechanism(settings: Settings) -> Mechanism:
    """The mechanism with the run's settings of it."""
    kind = mechanisms.kind_of(settings.mechanism)
    options = dict(settings.mechanism_options)
    defaults = {item.name: item.default for item in fields(kind)}  # type: ignore[arg-type]
    if settings.repeats not in (None, "auto") and "repeats" in defaults:
        options.setdefault("repeats", settings.repeats)
    if settings.exact is not None:
        words = settings.exact.split(",")
        options.setdefault("exact", words[0] if words[0] in ("auto", "none") and len(words) == 1 else tuple(words))
    for name, value in options.items():
        if name not in defaults:
            raise UsageError(f"{settings.mechanism} has no setting {name!r}; it has {', '.join(defaults)}.")
        if value is None and "None" not in str(kind.__annotations__.get(name, "None")):
            options[name] = "none"  # the word, where a setting takes words but not nothing
    try:
        return kind(**options)
    except (TypeError, ValueError) as problem:  # nothing but the given values has been looked at yet
        raise UsageError(str(problem)) from problem


def make_unit(settings: Settings) -> str | Callable[[Any], Any] | None:
    """Who a record belongs to: the name of a column, or a function of a record."""
    return settings.unit if settings.unit is None or ":" not in settings.unit else users_function(settings.unit)


def _call(path: str, offered: Mapping[str, Any]) -> Any:
    """Call package.module:function with those of the offered arguments that it takes."""
    function = users_function(path)
    try:
        taken = inspect.signature(function).parameters
        return function(**{name: value for name, value in offered.items() if name in taken})
    except Exception as problem:
        raise UsageError(f"{path} failed: {named(problem)}") from problem


def users_function(path: str) -> Callable[..., Any]:
    """package.module:function."""
    module_name, _, function_name = path.partition(":")
    function = getattr(user_module(module_name), function_name, None)
    if not callable(function):
        raise UsageError(f"the module {module_name!r} has no function {function_name!r}.")
    return cast(Callable[..., Any], function)


# --- a run's model ------------------------------------------------------------------------------------------------------
class TrainedModel:
    """Call it with inputs as a numpy array, scaled as the data set is; it returns one row of scores per record.

    The scores are the model's outputs over the run's `temperature`, which is 1 where none was fitted.
    """

    def __init__(self, model: nn.Module, settings: Settings, temperature: float = 1.0) -> None:
        self.model, self.settings, self.temperature = model.eval(), settings, temperature

    def __call__(self, inputs: Any) -> np.ndarray:
        with torch.inference_mode():
            return np.asarray(tempered(self.model, self.temperature)(torch.as_tensor(np.asarray(inputs))))

    def classes(self, inputs: Any) -> np.ndarray:
        """The class with the highest score, for each record."""
        return np.asarray(self(inputs).argmax(1))

    def score(self, dataset: str | None = None) -> Scores:
        """How good it is on the test part of its own data set, or of another one; of another table, on all of it. It is public."""
        if dataset is None and self.settings.evaluation_epsilon is not None:
            raise PrivacyRefusal(
                "the held-out records of this run are private, and an accuracy without noise would not be covered: that with noise "
                "stands in its result.json. Name other data, which is public (--dataset)."
            )
        settings = self.settings if dataset is None else replace(self.settings, dataset=dataset, holdout=0, test=None)
        whole, test = load_data(settings)
        if test is None and dataset is not None and _is_file(settings):
            test = whole
        if test is None:
            raise UsageError(f"{settings.dataset} has no test part. Name public data with --dataset.")
        try:
            return score(tempered(self.model, self.temperature), test)
        except (RuntimeError, ValueError) as problem:
            raise UsageError(f"the model does not fit the data set {settings.dataset}: {problem}") from problem


def load(run: Path | str) -> TrainedModel:
    """The model of a run: the finished one, or that of the last checkpoint."""
    folder = Path(run)
    settings, _ = open_config(folder)
    if not any((folder / name).exists() for name in (checkpoint.MODEL, checkpoint.CHECKPOINT)):
        raise RunError(f"{folder} has no model yet.")
    model = make_model(settings)
    about = checkpoint.load_model(folder, model)
    return TrainedModel(model, settings, float(about.get("temperature", 1.0)))
