"""An epsilon is never shown smaller than it is, a measurement never larger."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpulr.accounting.rounding import down, up


@given(st.floats(1e-12, 1e12), st.integers(2, 7))
def test_bounds_of_the_value_within_a_unit_of_the_last_figure(value, figures):
    above, below = float(up(value, figures)), float(down(value, figures))
    assert value * (1 - 2e-12) <= above <= value * (1 + 10.0 ** (1 - figures) + 2e-12)
    assert value * (1 - 10.0 ** (1 - figures) - 2e-12) <= below <= value * (1 + 2e-12)


@pytest.mark.parametrize(
    ("value", "above", "below"),
    [(0.91671, "0.9168", "0.916"), (1.0, "1", "1"), (0.1 + 0.2, "0.3", "0.3"), (12345.6, "12350", "12300"), (0.0, "0", "0")],
)
def test_as_shown(value, above, below):
    assert (up(value), down(value)) == (above, below)


def test_what_is_no_figure():
    assert (up(math.inf), down(math.inf), up(-1.0), up(math.nan)) == ("infinity", "infinity", "0", "nan")
