"""The only validators: each takes what it says, and says what it takes."""

import math

import numpy as np
import pytest

from dpulr import validate
from dpulr.errors import InvalidArgument

NUMBERS = [0, 1, 2.5, -3.0, np.float32(0.5), np.int64(7)]
NOT_NUMBERS = ["2", None, True, math.nan, [1.0], 1j]


@pytest.mark.parametrize("value", NUMBERS)
def test_numbers(value):
    assert validate.number("x", value) == value
    assert type(validate.number("x", value)) is float
    assert validate.number("x", math.inf) == math.inf


CHECKS = {
    "number": (validate.number, "a number", []),
    "positive": (validate.positive, "a positive, finite number", [0, -1.0, math.inf]),
    "at_least": (lambda n, v: validate.at_least(n, v, 2), "a finite number of at least 2", [1.9, -5, math.inf]),
    "whole_number": (validate.whole_number, "a whole number of at least 1", [0, -1, 1.0, 2.5, math.inf]),
    "fraction": (validate.fraction, "a number strictly between 0 and 1", [0, 1, 1.5, -0.1]),
    "rate": (lambda n, v: validate.rate(v, n), "a number above 0 and at most 1", [0.0, 1.0001, math.inf]),
    "delta": (lambda n, v: validate.delta(v, n), "a number strictly between 0 and 1, well below", [0.0, 1.0, 1.5]),
    "boolean": (validate.boolean, "True or False", [0, 1]),
    "one_of": (lambda n, v: validate.one_of(n, v, ("a", "b", 3)), "'a', 'b' or 3", ["c", 3.0, 4]),
    "method": (lambda n, v: validate.method(v), "'pld' or 'rdp'", ["moments", 1]),
}


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_refused_and_how(check):
    test, wanted, bad = CHECKS[check]
    for value in [*bad, *(value for value in NOT_NUMBERS if not (check == "boolean" and value is True))]:
        with pytest.raises(InvalidArgument) as problem:
            test("method" if check == "method" else "x", value)
        name = "method" if check == "method" else "x"
        assert str(problem.value).startswith(f"{name} is {value!r}; it must be {wanted}")


def test_what_is_taken():
    assert validate.positive("x", 2) == 2.0
    assert validate.at_least("x", 0, 0) == 0.0
    assert validate.whole_number("x", np.int64(7)) == 7
    assert type(validate.whole_number("x", np.int64(7))) is int
    assert validate.whole_number("x", 0, 0) == 0
    assert validate.fraction("x", 0.5) == 0.5
    assert validate.rate(1) == 1.0
    assert validate.delta(1e-5) == 1e-5
    assert validate.boolean("x", False) is False
    assert validate.one_of("x", "b", ["a", "b"]) == "b"
    assert validate.method("rdp") == "rdp"


def test_names_of_rates_and_deltas():
    with pytest.raises(InvalidArgument, match="sample_rate is 2"):
        validate.rate(2)
    with pytest.raises(InvalidArgument, match="target_delta is 2"):
        validate.delta(2, "target_delta")


def test_one_value_per_layer():
    assert validate.per_layer("w", None, 3, 1) == [1, 1, 1]
    assert validate.per_layer("w", 2.5, 2, 1) == [2.5, 2.5]
    assert validate.per_layer("w", (1, 2), 2, 1) == [1, 2]
    assert validate.per_layer("w", np.array([1.0, 2.0]), 2, 1) == [1.0, 2.0]
    with pytest.raises(InvalidArgument, match="w has 1 entries for 2 layers"):
        validate.per_layer("w", [1], 2, 1)
    for value in ("12", object()):
        with pytest.raises(InvalidArgument, match="w is"):
            validate.per_layer("w", value, 2, 1)
