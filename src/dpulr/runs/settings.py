"""The only description of a run: defaults, a config file, single values on top. No torch here, so that help comes at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from dpulr import __version__, validate
from dpulr.distributed.launch import RANK_TIMEOUT
from dpulr.errors import UsageError
from dpulr.runs.values import converted, pair_of, table_of

Check = Callable[[str, Any], object]
IN_PROGRAM = "in-program"  # data and model of a program of its own (`runs.record`), which settings can't name
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop")


def _option(default: Any, help: str, check: Check | None = None) -> Any:
    """A setting with its help text and the check of its values (None is not checked)."""
    return field(default=default, metadata={"help": help, "check": check})


def _at_least(least: int) -> Check:
    return lambda name, value: validate.whole_number(name, value, least)


def _word(*words: str) -> Check:
    return lambda name, value: validate.one_of(name, value, words)


def _or_auto(check: Check) -> Check:
    def checked(name: str, value: Any) -> None:
        if isinstance(value, str):
            validate.one_of(name, value, ("auto",))
        else:
            check(name, value)

    return checked


def _delta(name: str, value: float) -> None:
    validate.delta(value, name)


def _noise(name: str, value: float) -> None:
    validate.at_least(name, value, 0)


def _momentum(name: str, value: float) -> None:
    if value != 0:
        validate.fraction(name, value)


def _threshold(name: str, value: int | str) -> None:
    if value != "auto":
        validate.whole_number(name, value, 0)


@dataclass(frozen=True)
class Settings:
    """Everything that decides what a run does. The defaults are the main job: MNIST, the paper's MLP, epsilon 1.

    Their help texts are those of `dpulr train --help`.
    """

    dataset: str = _option(
        "mnist",
        "Data set: mnist, fashion-mnist, cifar10, csv:FILE or parquet:FILE, or package.module:function returning (train, test).",
    )
    schema: str | None = _option(None, "csv: and parquet: the TOML file that says what is public of the columns.")
    label: str | None = _option(None, "csv: and parquet: the column to predict, if the schema does not name it.")
    test: str | None = _option(None, "csv: and parquet: another file, with test records. They count as public.")
    text: str | None = _option(None, "csv: and parquet: the column of texts, for --model hf:PATH; --label names the other one.")
    labels: str = _option("0,1", "With --text: what a label may be, by commas: words or numbers.")
    tokens: int = _option(128, "With --text: texts are cut or padded to so many tokens.", _at_least(3))
    model: str = _option(
        "auto", "Model: auto (by data set), mlp, resnet5, hf:FOLDER (of Hugging Face, for --text), or package.module:function."
    )
    trained: str = _option("head", "hf: what is trained: head, last:N (the last N blocks and the head), bias, lora, lora:N or all.")
    keep_frozen: str | None = _option(
        None, "Frozen layers before the first trained one are computed once per record, and kept: memory, or a folder."
    )
    features: str | None = _option(
        None, "Train on features from a public model: scattering, efficientnet-lite0. The default model is then a linear layer."
    )
    mechanism: str = _option(
        "hidden-direction", "hidden-direction, gaussian, gradient or zeroth-order; paper (nominal only); or package.module:name."
    )
    repeats: int | str | None = _option(
        "auto", "Perturbations per record, layer and step: a number, or auto (by budget and model).", _or_auto(_at_least(1))
    )
    exact: str | None = _option(
        None, "hidden-direction: layers that take exact gradients by a backward pass: auto, none, or their names, by commas."
    )
    batch_size: int | str = _option(
        "auto", "Expected size of a batch: a number, or auto (by budget and epochs).", _or_auto(_at_least(1))
    )
    epochs: float = _option(10.0, "How often a record is seen on average.", validate.positive)
    steps: int | None = _option(None, "Number of steps, instead of --epochs.", _at_least(1))
    seconds: float | None = _option(
        None, "Train for about so long, instead of --epochs: how many fit is measured on synthetic records.", validate.positive
    )
    target_epsilon: float | None = _option(1.0, "The budget, never exceeded. The noise is calibrated to it.", validate.positive)
    target_delta: float = _option(1e-5, "Delta of the guarantee.", _delta)
    noise_multiplier: float | None = _option(None, "Noise, instead of the calibrated one. The budget still holds.", _noise)
    learning_rate: float | str = _option(
        "auto", "Learning rate at the start: a number, or auto (by budget, batch size and model).", _or_auto(validate.positive)
    )
    momentum: float = _option(0.9, "Momentum of SGD.", _momentum)
    optimizer: str = _option("sgd", f"{', '.join(OPTIMIZERS)}.", _word(*OPTIMIZERS))
    loss: str = _option(
        "auto", "cross-entropy, squared, absolute, zero-one, or package.module:function. auto: cross-entropy, squared for numbers."
    )
    device: str = _option("cpu", "Where the model is and the passes run: cpu, cuda, ...")
    schedule: str = _option("cosine", "Learning rate: cosine (half a cosine down to 0), or constant.", _word("cosine", "constant"))
    temperature: float | None = _option(
        None, "Share of the budget for a temperature of the outputs, fitted after the last step: such as 0.02.", validate.fraction
    )
    holdout: int = _option(
        0, "Test on the last n training records. They count as public, unless --evaluation-epsilon is given.", _at_least(0)
    )
    evaluation_epsilon: float | None = _option(
        None, "Test records are private: accuracies get noise, and all of them cost this share of the budget.", validate.positive
    )
    sampling: str = _option("poisson", "poisson; or shuffle, for which no guarantee is known.", _word("poisson", "shuffle"))
    rejection_threshold: int | str = _option(0, "Draw batches below this size again: a number, or auto.", _threshold)
    min_dataset_size: int | None = _option(None, "Public lower bound on the size of the data set, for rejection.", _at_least(1))
    unit: str | None = _option(
        None, "Protect people rather than records: the column that names the person, or package.module:function of a record."
    )
    max_per_person: int = _option(8, "With --unit: the most records of a person in a step, chosen at random.", _at_least(1))
    seed: int = _option(0, "Public randomness only: initial weights, subspaces.", _at_least(0))
    insecure_noise_seed: int | None = _option(None, "Repeatable noise, for tests: voids the guarantee.", _at_least(0))
    rank_timeout: float = _option(
        RANK_TIMEOUT, "Of several processes: seconds that one waits for another before the run ends.", validate.timeout
    )
    evaluations: int = _option(
        20, "How often the held-out data is evaluated and a checkpoint written; 0: never evaluated.", _at_least(0)
    )
    mechanism_options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Further settings of the mechanism, by --set mechanism.NAME=VALUE."}
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value = converted(item.name, getattr(self, item.name), types_of(item.name))
            if value is not None and item.metadata.get("check") is not None:
                item.metadata["check"](item.name, value)
            object.__setattr__(self, item.name, value)
        if self.temperature is not None and self.target_epsilon is None:
            raise UsageError("temperature is a share of the budget: give target_epsilon, too.")
        if self.target_epsilon is not None and (self.evaluation_epsilon or 0) >= self.target_epsilon * (
            1 - (self.temperature or 0)
        ):
            raise UsageError(
                f"evaluation_epsilon is {self.evaluation_epsilon:g}; it is a share of target_epsilon, {self.target_epsilon:g}, "
                "so it must be smaller."
            )
        if self.seed >= 2**32:
            raise UsageError(f"seed is {self.seed}; it must be a whole number from 0 to 2^32 - 1.")

    @property
    def epsilon_of_steps(self) -> float | None:
        """What noisy evaluations and a temperature leave of the budget: their epsilon adds up (docs/theory.md)."""
        if self.target_epsilon is None:
            return None
        return self.target_epsilon * (1 - (self.temperature or 0.0)) - (self.evaluation_epsilon or 0.0)

    @property
    def size(self) -> int:
        """The batch size, where it is a number."""
        if isinstance(self.batch_size, str):
            raise UsageError(f"batch_size is {self.batch_size!r}; a number is needed here.")
        return self.batch_size

    @property
    def rate(self) -> float:
        """The learning rate, where it is a number."""
        if isinstance(self.learning_rate, str):
            raise UsageError(f"learning_rate is {self.learning_rate!r}; a number is needed here.")
        return self.learning_rate

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> bytes:
        """The content of config.json; `dpulr train --config` takes it as it is."""
        return (json.dumps({"version": __version__, **self.to_dict()}, indent=1) + "\n").encode()

    @classmethod
    def build(
        cls, config: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None, sets: Iterable[str] = ()
    ) -> Settings:
        """Defaults, then a config, then options, then `key=value` pairs; the last one wins."""
        values = {**(config or {}), **(options or {})}
        version = values.pop("version", __version__)
        own = dict(table_of(values.pop("mechanism_options", {})))
        for name, value in map(pair_of, sets):
            if name.startswith("mechanism."):
                own[name.removeprefix("mechanism.")] = value
            else:
                values[name] = value
        unknown = sorted(set(values) - set(NAMES))
        if unknown:
            writer = "" if version == __version__ else f" The config was written by dpulr {version}, this is {__version__}."
            raise UsageError(f"there is no setting {unknown[0]!r}. The settings are: {', '.join(NAMES)}, mechanism.NAME.{writer}")
        if values.get("mechanism") == "paper":
            values = {**_papers_setting(values, own), **values}
        if str(values.get("dataset", "")).startswith(("csv:", "parquet:")):
            values.setdefault("mechanism", "gradient")  # the model is linear, or a small network: exact gradients learn most
        if values.get("evaluation_epsilon") is not None:
            values.setdefault("evaluations", 1)  # each costs a part of the share
        return cls(**values, mechanism_options=own)


NAMES = tuple(item.name for item in fields(Settings) if item.name != "mechanism_options")


def _papers_setting(values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What the paper's method is run with where nothing is said: the paper's batches of 500 and sigma0 of 4.

    It has no certified epsilon, hence no target. Batches below nine tenths of the expected size are drawn again: its theorem needs
    a threshold, and one that is far enough below the expected size costs few redraws.
    """
    if values.get("target_epsilon") is not None:
        raise UsageError("the paper mechanism has no certified epsilon: give --noise-multiplier (sigma0), no target.")
    batch_size = converted("batch_size", values.get("batch_size", 500), types_of("batch_size"))
    batch_size = 500 if batch_size == "auto" else batch_size
    found: dict[str, Any] = {"batch_size": batch_size, "target_epsilon": None, "repeats": None}
    if "target_std" not in own:
        found["noise_multiplier"] = 4.0
    if "rejection_threshold" not in own and values.get("sampling", "poisson") == "poisson":
        found["rejection_threshold"] = int(0.9 * batch_size) if isinstance(batch_size, int | float) else 0
    return found


@cache
def types_of(name: str) -> tuple[type[Any], ...]:
    """The types that a setting can have."""
    hint = get_type_hints(Settings)[name]
    kinds = get_args(hint) if get_origin(hint) is not dict and get_args(hint) else (get_origin(hint) or hint,)
    return tuple(kinds)
