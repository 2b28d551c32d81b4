"""What the estimators share: public bounds, one private run, and an account of all fits of an estimator and its clones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator, clone
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d, validate_data
from torch import nn

from dpulr import accounting, validate
from dpulr.accounting.events import Charge
from dpulr.data.views import ArrayDataset
from dpulr.engine import PrivacyEngine
from dpulr.errors import InvalidArgument, PrivacyRefusal
from dpulr.mechanisms import Mechanism
from dpulr.model.losses import LossFunction
from dpulr.models import mlp

FROM_DATA = "unsafe-from-data"
_STEPS, _FULL_BATCH, _DRIFT = 200, 10_000, 0.5
Auto = Literal["auto"]


class _Fits:
    """What an estimator and its clones have spent on fits. A copy that was pickled, or copied otherwise, can't add to it."""

    def __init__(self) -> None:
        self.charges: list[Charge] = []
        self.reasons: list[str] = []
        self.moved = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.moved = True


class Private(BaseEstimator):  # type: ignore[misc]
    """What both estimators share."""

    epsilon: float
    delta: float | Auto
    bounds: Any
    hidden_layer_sizes: Sequence[int]
    mechanism: str | Mechanism
    steps: int | Auto
    batch_size: int | Auto
    learning_rate: float | Auto
    repeated_fits: str
    seed: int
    _momentum = 0.0

    # --- training -------------------------------------------------------------------------------------------------------
    def _fit(self, X: Any, targets: np.ndarray, outputs: int, loss: LossFunction, schema: Any, taken: str) -> None:
        """Train on scaled features and targets of the schema's type; a target that this can't hold contributes nothing."""
        inputs = self._scaled(X)
        records = len(inputs)
        model = mlp([inputs.shape[1], *self.hidden_layer_sizes, outputs], seed=self.seed)
        last = model[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=self._momentum)
        engine = PrivacyEngine(
            model,
            optimizer,
            ArrayDataset(inputs, targets),  # type: ignore[arg-type]
            loss,
            mechanism=self.mechanism,
            batch_size=_batch_size(records) if self.batch_size == "auto" else self.batch_size,
            steps=_STEPS if self.steps == "auto" else self.steps,
            target_epsilon=self.epsilon,
            target_delta=_delta(records) if self.delta == "auto" else self.delta,
            schema=(np.zeros(inputs.shape[1], dtype=np.float32), schema),
            seed=self.seed,
        )
        fits = self._may_fit(engine)
        for group in optimizer.param_groups:
            group["lr"] = self._rate(engine, inputs.shape[1]) if self.learning_rate == "auto" else self.learning_rate
        try:
            self.model_ = _trained(engine).eval()
        finally:
            fits.charges.extend(engine.ledger.charges)
            fits.reasons.extend(reason for reason in self._unsafe() if reason not in fits.reasons)
        spent = engine.privacy_spent()
        self.privacy_ = accounting.privacy_spent(
            fits.charges,
            spent.delta,
            reasons=[*spent.reasons, *fits.reasons],
            public_size=spent.public_size,
            schema=f"{spent.schema}; {taken}",
        )
        self.n_iter_ = engine.steps_taken

    def _rate(self, engine: PrivacyEngine, features: int) -> float:
        """The learning rate with which noise alone moves a weight by `_DRIFT` in a run, unless the loss calls for a smaller one."""
        drift = math.sqrt(engine.planned_steps) * engine.noise_multiplier / engine.expected_batch_size
        return min(self._largest_rate(features), (1 - self._momentum) * _DRIFT / max(drift, 1e-12))

    def _largest_rate(self, features: int) -> float:
        raise NotImplementedError

    def _may_fit(self, engine: PrivacyEngine) -> _Fits:
        """The account that this fit is charged to; or a refusal, if it is not the first and that was not asked for."""
        validate.one_of("repeated_fits", self.repeated_fits, ("refuse", "add up"))
        fits: _Fits = self.__dict__.setdefault("_fits", _Fits())
        again = bool(fits.charges) or getattr(self, "_is_clone", False)
        if again and self.repeated_fits == "refuse":
            five = accounting.privacy_spent([Charge(engine.plan.event, 5 * engine.planned_steps)], engine.target_delta)
            raise PrivacyRefusal(
                "this is a clone of an estimator, or it has been fitted before. Cross-validation and searches train on the data "
                f"again and again: five fits like this one cost epsilon {five.epsilon or math.inf:.3g} in all, and no guarantee "
                "covers their scores. dpulr.tune chooses settings on private data for one epsilon; or choose them on public data, "
                "or keep the defaults. On other data take a new estimator. "
                'repeated_fits="add up" allows it; then privacy_ states the cost of all fits.'
            )
        if again and fits.moved:
            raise PrivacyRefusal(
                "this estimator comes from a pickle or another process, so its fits can't be added up with those made elsewhere. "
                "Use n_jobs=1."
            )
        return fits

    def __sklearn_clone__(self) -> Private:
        """As scikit-learn's own, but it is known for a clone, and its fits are charged to the same account."""
        twin = type(self)(**{name: clone(value, safe=False) for name, value in self.get_params(deep=False).items()})
        twin._fits = self.__dict__.setdefault("_fits", _Fits())
        twin._is_clone = True
        return twin

    # --- features -------------------------------------------------------------------------------------------------------
    def _table(self, X: Any, *, fitting: bool = False) -> np.ndarray:
        """The features as float64, record by record: what is no number becomes NaN. Shape and type are public, values are not."""
        plain = X if hasattr(X, "toarray") else np.asarray(X)  # what is sparse is refused below
        if getattr(plain, "dtype", None) is not None and plain.dtype.kind in "OUS":
            plain = np.vectorize(as_number, otypes=[np.float64])(plain)
        table = check_array(plain, dtype=np.float64, ensure_all_finite=False, estimator=self, input_name="X")
        validate_data(self, X, reset=fitting, skip_check_array=True)
        return np.asarray(table)

    def _find_bounds(self, table: np.ndarray) -> None:
        if isinstance(self.bounds, str) and self.bounds == FROM_DATA:
            finite = np.where(np.isfinite(table), table, np.nan)
            with np.errstate(all="ignore"):
                low, high = np.nanmin(finite, axis=0, initial=np.inf), np.nanmax(finite, axis=0, initial=-np.inf)
            self.bounds_ = np.stack([np.where(low <= high, low, 0), np.where(low <= high, high, 0)])
        else:
            self.bounds_ = as_range("bounds", self.bounds, table.shape[1])

    def _scaled(self, table: np.ndarray) -> np.ndarray:
        """To -1 .. 1 by the public bounds. What lies outside is moved to the bound; a missing value to the middle."""
        low, high = self.bounds_
        with np.errstate(all="ignore"):
            place = (np.clip(table, low, high) - low) / np.where(high > low, high - low, 1)
        return np.asarray(np.nan_to_num(2 * place - 1), dtype=np.float32)

    def _outputs(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        with torch.inference_mode():
            return np.asarray(self.model_(torch.from_numpy(self._scaled(self._table(X)))).double())

    def _unsafe(self) -> list[str]:
        unsafe = isinstance(self.bounds, str) and self.bounds == FROM_DATA
        return ["the ranges of the features were taken from the data"] if unsafe else []

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True
        tags.input_tags.allow_nan = True
        return tags


# --- public arithmetic --------------------------------------------------------------------------------------------------
def _delta(records: int) -> float:
    return min(1e-5, 1 / (10 * records))


def _batch_size(records: int) -> int:
    """Up to ten thousand records all of them, later ten thousand or a tenth: larger batches save next to no noise."""
    return min(records, max(_FULL_BATCH, records // 10))


def _trained(engine: PrivacyEngine) -> nn.Module:
    """Take all steps. The mean of the weights of the second half has less noise than the last, and costs nothing."""
    mean, count = deepcopy(engine.model), 0
    for parameter in mean.parameters():
        parameter.data.zero_()
    for inputs, targets in engine.batches():
        engine.step(inputs, targets)
        if 2 * engine.steps_taken > engine.planned_steps:
            count += 1
            for average, parameter in zip(mean.parameters(), engine.model.parameters(), strict=True):
                average.data += (parameter.data - average.data) / count
    return mean


# --- values -------------------------------------------------------------------------------------------------------------
NEEDED = (
    "{0} is missing: {1}, as everybody may know it, for example {0}={2}. Taking it from the data would tell of single records; "
    f'{{0}}="{FROM_DATA}" does so, and voids the guarantee.'
)


def as_range(name: str, given: Any, columns: int) -> np.ndarray:
    """(2, columns): the lowest and the highest value of each column."""
    if given is None:
        raise InvalidArgument(NEEDED.format(name, "a pair (low, high)", "(0, 100)"))
    wanted = f"a pair (low, high) of finite numbers, or of lists of {columns}, with low below high"
    try:
        low, high = (np.broadcast_to(np.asarray(part, dtype=np.float64), (columns,)) for part in given)
    except (TypeError, ValueError):
        validate.refuse(name, given, wanted)
    if not (np.isfinite(low) & np.isfinite(high) & (low < high)).all():
        validate.refuse(name, given, wanted)
    return np.stack([low, high])


def column(estimator: object, y: Any) -> np.ndarray:
    """y as a column. Its shape is public; what is in it is not looked at."""
    if y is None:
        raise InvalidArgument(f"{type(estimator).__name__} requires y to be passed, but the target y is None.")
    return np.asarray(column_or_1d(y, warn=True))


def same_length(table: np.ndarray, targets: np.ndarray) -> None:
    if len(table) != len(targets):
        raise InvalidArgument(f"X has {len(table)} records, y has {len(targets)}: inconsistent numbers of samples.")


def as_number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
