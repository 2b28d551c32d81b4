"""The only searches: the last whole number, the point on a line, the root."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpulr import search


@given(st.integers(-1000, 1000), st.integers(0, 3000), st.integers(1, 3000))
def test_the_last_whole_number(low, answer, beyond):
    tried = []

    def holds(n):
        tried.append(n)
        return n <= low + answer

    assert search.last_true(holds, low, low + answer + beyond) == low + answer
    assert not {low, low + answer + beyond} & set(tried)
    assert len(tried) <= math.ceil(math.log2(answer + beyond)) if answer + beyond > 1 else not tried


def test_nothing_lies_between():
    assert search.last_true(lambda n: pytest.fail("tried"), 3, 4) == 3
    assert search.last_true(lambda n: pytest.fail("tried"), 3, 3) == 3


@given(st.floats(-100, 100), st.sampled_from([1.0, 1e-3, 1e-9]))
def test_the_point_on_a_line(point, width):
    low, high = search.boundary(lambda x: x <= point, -101.0, 101.0, width)
    assert low <= point < high
    assert high - low <= width


@given(st.floats(1e-300, 100))
def test_down_to_two_neighbouring_floats(point):
    low, high = search.boundary(lambda x: x <= point, 0.0, 101.0)
    assert low == point
    assert high == math.nextafter(point, math.inf)


def test_the_root():
    assert search.root(lambda x: x**3 - 2, 0.0, 2.0) == pytest.approx(2 ** (1 / 3), abs=1e-11)
    with pytest.raises(ValueError, match="sign"):
        search.root(lambda x: x**2 + 1, 0.0, 2.0)
