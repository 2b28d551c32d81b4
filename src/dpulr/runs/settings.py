"""The settings of a run: defaults, a config file, single values on top. No torch here, so that help and errors come at once."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from dpulr.runs.errors import UsageError


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    """Everything that decides what a run does. The defaults are the main job: MNIST, the paper's MLP, epsilon 1.

    Their help texts are those of `dpulr train --help`.
    """

    dataset: str = _option("mnist", "Data set: mnist, fashion-mnist, cifar10, or package.module:function returning (train, test).")
    model: str = _option("auto", "Model: auto (by data set), mlp, resnet5, or package.module:function.")
    mechanism: str = _option("hidden-direction", "hidden-direction, gaussian or zeroth-order; paper, which has no guarantee.")
    repeats: int | None = _option(8, "Perturbations a record, layer and step.")
    batch_size: int = _option(2_000, "Expected size of a batch.")
    epochs: float = _option(10.0, "How often a record is seen on average.")
    steps: int | None = _option(None, "Number of steps, instead of --epochs.")
    target_epsilon: float | None = _option(1.0, "The budget. The noise is calibrated to it, and training never exceeds it.")
    target_delta: float = _option(1e-5, "Delta of the guarantee.")
    noise_multiplier: float | None = _option(None, "Noise, instead of the calibrated one. The budget still holds.")
    learning_rate: float = _option(0.4, "Learning rate at the start; it falls to 0 along half a cosine.")
    momentum: float = _option(0.9, "Momentum of SGD.")
    average: float = _option(0.0, "Above 0: the result is a moving average of the weights, with this decay.")
    sampling: str = _option("poisson", "poisson; or shuffle, for which no guarantee is known.")
    rejection_threshold: int | str = _option(0, "Draw batches below this size again: a number, or auto.")
    min_dataset_size: int | None = _option(None, "Public lower bound on the size of the data set, for rejection.")
    seed: int = _option(0, "Public randomness only: initial weights, subspaces.")
    insecure_noise_seed: int | None = _option(None, "Repeatable noise, for tests: voids the guarantee.")
    evaluations: int = _option(20, "How often the held-out data is evaluated and a checkpoint written.")
    mechanism_options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Further settings of the mechanism, by --set mechanism.NAME=VALUE."}
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, _converted(item.name, getattr(self, item.name)))
        if self.evaluations < 1:
            raise UsageError(f"evaluations is {self.evaluations}; it must be at least 1.")
        if self.rejection_threshold != "auto" and not isinstance(self.rejection_threshold, int):
            raise UsageError(f"rejection_threshold is {self.rejection_threshold!r}; it must be a whole number or 'auto'.")
        if self.sampling not in ("poisson", "shuffle"):
            raise UsageError(f"sampling is {self.sampling!r}; it must be 'poisson' or 'shuffle'.")
        for name in ("batch_size", "epochs", "learning_rate"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be positive.")
        for name in ("momentum", "average"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1.")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"seed is {self.seed}; it must be a whole number from 0 to 2^32 - 1.")

    def to_json(self) -> bytes:
        """The content of config.json; `dpulr train --config` takes it as it is."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @classmethod
    def build(cls, config: Path | None = None, options: Mapping[str, Any] | None = None, sets: Iterable[str] = ()) -> Settings:
        """Defaults, then the config file, then options, then `key=value` pairs; the last one wins."""
        values: dict[str, Any] = {} if config is None else read_config(config)
        for name in INVOCATION:
            values.pop(name, None)
        values.update(options or {})
        extra = dict(_table(values.pop("mechanism_options", {})))
        for name, value in map(_pair, sets):
            if name.startswith("mechanism."):
                extra[name.removeprefix("mechanism.")] = value
            else:
                values[name] = value
        if values.get("mechanism") == "paper" and values.setdefault("target_epsilon", None) is not None:
            raise UsageError("the paper mechanism has no certified epsilon: give --noise-multiplier (sigma0), no target.")
        unknown = sorted(set(values) - set(NAMES))
        if unknown:
            raise UsageError(f"there is no setting {unknown[0]!r}. The settings are: {', '.join(NAMES)}, mechanism.NAME.")
        return cls(**values, mechanism_options=extra)


NAMES = tuple(item.name for item in fields(Settings) if item.name != "mechanism_options")

INVOCATION: dict[str, type[Any]] = {"out": str, "allow_uncertified": bool, "show_unprotected": bool, "json": bool}


def invocation(config: Path | None) -> dict[str, Any]:
    """What a config file says about how to run, rather than what to run."""
    values = {} if config is None else read_config(config)
    found = {name: values[name] for name in INVOCATION if name in values}
    for name, value in found.items():
        if not isinstance(value, INVOCATION[name]):
            raise UsageError(f"{name} is {_short(value)}; it must be {'a path' if name == 'out' else 'true or false'}.")
    return found


def read_config(path: Path) -> dict[str, Any]:
    """Settings in a TOML file (or the config.json of a run). A table [mechanism] holds its name and its settings."""
    try:
        raw = path.read_bytes()
    except OSError as problem:
        raise UsageError(f"the config file {path} can't be read: {problem.strerror or problem}.") from problem
    try:
        text = raw.decode()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"the config file {path} is not valid: {problem}.") from problem
    values = dict(_table(values))
    mechanism = values.get("mechanism")
    if isinstance(mechanism, dict):
        own = dict(mechanism)
        values["mechanism"] = own.pop("name", Settings.mechanism)
        if "repeats" in own:
            values["repeats"] = own.pop("repeats")
        values["mechanism_options"] = {**dict(_table(values.get("mechanism_options", {}))), **own}
    return values


def _table(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"a table of settings was expected, not {_short(value)}.")
    return value


def _pair(text: str) -> tuple[str, Any]:
    """`key=value`, the value as in TOML; what is not TOML is taken as a word."""
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise UsageError(f"--set takes key=value, not {_short(text)}.")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return name.strip(), None if value.strip() in ("none", "None") else value.strip()
    return name.strip(), parsed["value"] if set(parsed) == {"value"} else value.strip()


def _converted(name: str, value: Any) -> Any:
    """The value in the setting's type; only changes that lose nothing are made."""
    allowed = _types(name)
    if value is None and type(None) in allowed:
        return None
    if dict in allowed:
        return _plain(name, dict(_table(value)))
    if isinstance(value, bool):
        pass
    elif isinstance(value, int) and int in allowed:
        return value
    elif isinstance(value, int | float) and float in allowed and abs(value) < 1e300:
        return float(value)
    elif isinstance(value, float) and int in allowed and value.is_integer() and abs(value) < 2**53:
        return int(value)
    elif isinstance(value, str) and str in allowed and "\x00" not in value:
        return int(value) if int in allowed and value.isascii() and value.isdigit() and len(value) < 19 else value
    words = {int: "a whole number", float: "a number", str: "a word", type(None): "none"}
    expected = " or ".join(words[kind] for kind in allowed)
    raise UsageError(f"{name} is {_short(value)}; it must be {expected}.")


def _types(name: str) -> tuple[type[Any], ...]:
    hint = get_type_hints(Settings)[name]
    kinds = get_args(hint) if get_origin(hint) is not dict and get_args(hint) else (get_origin(hint) or hint,)
    return tuple(kinds)


def _plain(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Only what JSON can hold: a run must be repeatable from its config.json."""
    try:
        json.dumps(values)
    except (TypeError, ValueError, RecursionError) as problem:
        raise UsageError(f"{name} holds a value that can't be stored: {problem}.") from problem
    return values


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
