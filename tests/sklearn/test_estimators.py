"""The estimators: scikit-learn's own checks, what is public, what a bad record does, and what repeated fits cost."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from dpulr.errors import InvalidArgument, PrivacyRefusal
from dpulr.sklearn import PrivateClassifier, PrivateRegressor
from dpulr.sklearn import base as shared

UNSAFE = "unsafe-from-data"
NOISE = "compares two fits, whose noise is never the same"
FORBIDDEN = {
    "check_fit_idempotent": NOISE,
    "check_supervised_y_2d": NOISE,
    "check_classifier_data_not_an_array": NOISE,
    "check_regressor_data_not_an_array": NOISE,
    "check_regressors_int": NOISE,
    "check_pipeline_consistency": NOISE + " (scikit-learn skips it)",
    "check_dtype_object": "wants an error because of one record: whether it is raised would tell of that record",
    "check_supervised_y_no_nan": "wants an error because of one record's target: as above",
    "check_array_api_input": "asks for arrays of other libraries (skipped unless SCIPY_ARRAY_API is set)",
}
"""Checks of scikit-learn that privacy forbids to pass, or that are skipped, and why."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Small tables and large epsilons are warned of, rightly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def table(records: int = 400) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 10, (records, 3))
    return X, np.where(X[:, 0] + X[:, 1] > 10, "yes", "no")


def classifier(**other: Any) -> PrivateClassifier:
    return PrivateClassifier(**{"epsilon": 5.0, "bounds": (0, 10), "classes": ["no", "yes"], **other})


# --- as scikit-learn wants it -----------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("kind", [PrivateClassifier, PrivateRegressor])
def test_all_checks_of_scikit_learn_that_privacy_allows(kind: Any) -> None:
    """They hand in all kinds of tables, so that ranges and labels come from these, and fit again and again."""
    found = check_estimator(kind(20.0, 1e-5, UNSAFE, UNSAFE, repeated_fits="add up"), on_fail=None, on_skip=None)
    odd = {check["check_name"] for check in found if check["status"] != "passed"}
    assert len(found) > 40
    assert odd - set(FORBIDDEN) == set()
    assert "check_dtype_object" in odd  # it stays forbidden


def test_the_docs_list_the_checks_that_privacy_forbids() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tables.md").read_text()
    assert set(re.findall(r"`(check_\w+)`", page)) - {"check_estimator"} == set(FORBIDDEN)


def test_a_classifier_learns_and_states_what_it_cost() -> None:
    X, y = table()
    model = classifier(delta=1e-5).fit(X, y)
    assert model.score(X, y) > 0.85
    assert np.allclose(model.predict_proba(X).sum(axis=1), 1)
    assert ((model.decision_function(X) > 0) == (model.predict(X) == "yes")).all()
    assert model.privacy_.guarantee == "certified"
    assert 4 < model.privacy_.epsilon <= 5
    assert "the ranges of the features, and the 2 classes" in str(model.privacy_)


def test_a_regressor_stays_in_its_range() -> None:
    X, _ = table()
    model = PrivateRegressor(5.0, bounds=(0, 10), target_bounds=(0, 20)).fit(X, X[:, 0] + X[:, 1])
    assert model.score(X, X[:, 0] + X[:, 1]) > 0.7
    predicted = model.predict(100 * X - 500)
    assert 0 <= predicted.min() <= predicted.max() <= 20
    assert model.privacy_.guarantee == "certified"
    assert "the target, 0 to 20" in str(model.privacy_)


def test_a_network_and_another_mechanism() -> None:
    X, y = table()
    model = classifier(hidden_layer_sizes=(8,), mechanism="hidden-direction", steps=3, learning_rate=0.1, batch_size=50).fit(X, y)
    assert len(list(model.model_.parameters())) == 4
    assert (model.n_iter_, model.privacy_.mechanism) == (3, "hidden-direction")


def test_a_pipeline_and_a_pickle() -> None:
    X, y = table()
    line = make_pipeline(FunctionTransformer(np.sqrt), classifier(bounds=(0, 4), steps=20)).fit(X, y)
    again = pickle.loads(pickle.dumps(line))
    assert (again.predict(X) == line.predict(X)).all()
    assert again[-1].privacy_ == line[-1].privacy_


def test_the_shape_of_the_table_decides_the_settings() -> None:
    assert [shared._batch_size(n) for n in (50, 10_000, 20_000, 10**6)] == [50, 10_000, 10_000, 100_000]
    assert [shared._delta(n) for n in (50, 10_000, 10**6)] == [1e-5, 1e-5, 1e-7]


# --- what is public ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"bounds": None}, 'bounds is missing: .*"unsafe-from-data"'),
        ({"classes": None}, 'classes is missing: .*"unsafe-from-data"'),
        ({"bounds": (1, 0)}, "low below high"),
        ({"bounds": ([0, 0], [1, 1])}, "lists of 3"),
        ({"bounds": 7}, "a pair"),
        ({"bounds": (0, np.inf)}, "finite"),
        ({"classes": ["yes"]}, "at least two classes"),
        ({"repeated_fits": "often"}, "repeated_fits is 'often'"),
    ],
)
def test_what_is_public_must_be_said(other: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        classifier(**other).fit(*table(50))


def test_a_regressor_wants_the_range_of_its_target() -> None:
    with pytest.raises(InvalidArgument, match="target_bounds is missing"):
        PrivateRegressor(bounds=(0, 10)).fit(*table(50))


@pytest.mark.parametrize("name", ["bounds", "classes"])
def test_what_the_data_decided_voids_the_guarantee(name: str) -> None:
    model = classifier(**{name: UNSAFE}, steps=2).fit(*table(50))
    assert (model.privacy_.guarantee, model.privacy_.epsilon) == ("none", None)
    assert "taken from the data" in str(model.privacy_)


BAD: list[tuple[Any, Any]] = [
    ([np.nan, 1, 1], "yes"),
    ([np.inf, -np.inf, 1e300], "yes"),
    ([1, 1, 1], "perhaps"),
    ([1, "none", {"a": 1}], None),
    ([1, 1, 1], ["a list"]),
]


@pytest.mark.parametrize(("features", "label"), BAD, ids=str)
def test_a_bad_record_changes_its_own_row_alone(features: Any, label: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands in one record: no error, no warning, and the same records, sizes and settings for the others."""
    seen: list[Any] = []
    engine = shared.PrivacyEngine

    def spy(model: Any, optimizer: Any, dataset: Any, loss: Any, **given: Any) -> Any:
        seen.append((dataset, {name: value for name, value in given.items() if name != "schema"}))
        return engine(model, optimizer, dataset, loss, **given)

    monkeypatch.setattr(shared, "PrivacyEngine", spy)
    X, y = (part.astype(object) for part in table(40))
    classifier(steps=1).fit(X, y)
    X, y = X.copy(), y.copy()
    X[7] = features
    y[7] = label
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = classifier(steps=1).fit(X, y)
    assert {str(warning.message)[:20] for warning in warned} <= {"the data set has 40 "}
    assert model.predict(X).shape == (40,)
    (good, settings), (bad, same) = seen
    assert settings == same
    others = np.arange(40) != 7
    assert np.array_equal(good.inputs[others], bad.inputs[others])
    assert np.array_equal(good.targets[others], bad.targets[others])
    assert np.isfinite(bad.inputs).all()
    assert np.abs(bad.inputs).max() <= 1
    assert np.isnan(bad.targets[7]) == (label != "yes")


def test_a_label_outside_the_classes_contributes_nothing() -> None:
    """All records but one class's have unknown labels: the other's probability goes nowhere but up."""
    X, _ = table()
    y = np.where(np.arange(400) % 2 == 0, "yes", "perhaps")
    model = classifier(epsilon=50.0).fit(X, y)
    assert (model.predict(X) == "yes").all()


def test_a_target_that_is_no_number_contributes_nothing() -> None:
    X, _ = table()
    y = np.where(np.arange(400) % 2 == 0, 4.0, np.nan)
    model = PrivateRegressor(50.0, bounds=(0, 10), target_bounds=(0, 10)).fit(X, y)
    assert np.abs(model.predict(X) - 4).max() < 1


# --- fits add up ------------------------------------------------------------------------------------------------------------
def test_cross_validation_is_refused_with_its_price() -> None:
    X, y = table()
    with pytest.raises(ValueError, match=r"five fits like this one cost epsilon 1\d") as raised:  # scikit-learn's own summary
        cross_val_score(classifier(steps=5), X, y, cv=3)
    assert 'repeated_fits="add up"' in str(raised.value)
    with pytest.raises(PrivacyRefusal, match="clone"):
        clone(classifier(steps=5)).fit(X, y)


def test_a_second_fit_is_refused() -> None:
    X, y = table()
    model = classifier(steps=5).fit(X, y)
    first = model.privacy_
    with pytest.raises(PrivacyRefusal, match="fitted before"):
        model.fit(X, y)
    assert model.privacy_ == first


def test_fits_of_clones_add_up() -> None:
    X, y = table()
    once = classifier(steps=5, delta=1e-6).fit(X, y).privacy_
    search = GridSearchCV(classifier(steps=5, delta=1e-6, repeated_fits="add up"), {"learning_rate": [0.1, 1.0]}, cv=2)
    spent = search.fit(X, y).best_estimator_.privacy_
    assert spent.steps == 5 * once.steps  # two settings on two folds each, and the best on all records
    assert 2 * once.epsilon < spent.epsilon < 5 * once.epsilon


def test_fits_elsewhere_can_not_be_added_up() -> None:
    X, y = table(50)
    twin = pickle.loads(pickle.dumps(clone(classifier(repeated_fits="add up"))))
    with pytest.raises(PrivacyRefusal, match="n_jobs=1"):
        twin.fit(X, y)


def test_without_scikit_learn_it_says_what_to_install() -> None:
    program = "import sys; sys.modules['sklearn'] = None; sys.modules['sklearn.base'] = None; import dpulr.sklearn"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert re.search(r"ImportError: dpulr\.sklearn needs scikit-learn .*pip install 'dpulr\[sklearn\]'", ended.stderr)
