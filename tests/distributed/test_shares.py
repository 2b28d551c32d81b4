"""The numbers of docs/theory.md, section 9, "Shares": W shares of the noise together are as good as one number's noise."""

from __future__ import annotations

import itertools
import math

import mpmath as mp
import numpy as np
import pytest
from scipy import integrate

from dpulr.accounting import finite_precision
from dpulr.distributed.ranks import MOST_RANKS
from tests.accounting import ziggurat

RANKS = [2, 3, 4, 5, 7, 8, 16, 17, 64, 100, MOST_RANKS]
R = finite_precision.TAIL


def coarser(shares: int) -> int:
    """By how much the grid is: the first power of two from the root on."""
    return 2 ** math.ceil(math.log2(shares) / 2)


@pytest.mark.parametrize("shares", RANKS)
@pytest.mark.parametrize("place", [0.3, 2.0, 3.6, 5.0, 8.0])
def test_a_cell_of_one_share_errs_by_a_part_of_what_one_process_may(shares: int, place: float) -> None:
    """Counted exactly, as for one process: the interval is sqrt(W) times the grid, in standard deviations of a share."""
    rng = np.random.default_rng(shares)
    for scale in 2 ** rng.uniform(0, 1, 2):
        length = 2**-10 * coarser(shares) * math.sqrt(shares)
        low = place * scale + rng.uniform(0, 1) * 2**-7
        computed, left_open = ziggurat.probability(low, low + length, float(scale))
        near, far = (mp.mpf(edge) / scale / mp.sqrt(2) for edge in (low, low + length))
        ideal = (mp.erfc(near) - mp.erfc(far)) / 2
        end = float((low + length) / scale)  # where values are sparsest
        allowed = finite_precision.PER_NUMBER + (finite_precision._error_at(end) if end > R else 0)
        assert (abs(computed - ideal) + left_open) / ideal < allowed / shares


@pytest.mark.parametrize("shares", RANKS)
def test_together_the_tails_of_all_shares_err_less_than_one_number(shares: int) -> None:
    """The mean of the shares' errors, given the sum, by quadrature over a share's place."""
    spread = math.sqrt(1 - 1 / shares)
    for away in [0.0, 1.0, 2.0, 3.0, R, 4.0, 5.0, 7.0, 9.0, 11.0]:
        centre = away / math.sqrt(shares)

        def density(x: float, centre: float = centre) -> float:
            error = finite_precision._error_at(abs(x)) if abs(x) > R else 0.0
            return error * math.exp(-(((x - centre) / spread) ** 2) / 2) / (spread * math.sqrt(2 * math.pi))

        ends = [centre - 40, -R, R, centre + R * spread**2, centre + 40]
        mean = sum(integrate.quad(density, *pair, limit=200)[0] for pair in itertools.pairwise(ends) if pair[0] < pair[1])
        allowed = finite_precision._error_at(away) if away >= R else finite_precision.AT_TAIL
        assert mean < allowed  # one share errs by a W-th of it, and there are W


@pytest.mark.parametrize("shares", RANKS)
def test_terms_of_higher_order_are_smaller_still(shares: int) -> None:
    """All sign patterns of a shares, at the place where they weigh most."""
    for a in range(1, min(shares, 12) + 1):
        total = sum(
            math.comb(a, plus) * math.exp(R * b * R / math.sqrt(shares) + R**2 * (a - b * b / shares) / 2 - a * R * R)
            for plus, b in ((plus, 2 * plus - a) for plus in range(a + 1))
        )
        assert total < 1


@pytest.mark.parametrize("shares", RANKS)
def test_the_grid_is_fine_enough_for_the_sum_of_rounded_shares(shares: int) -> None:
    spacing = 2**-10 * coarser(shares) * math.sqrt(shares)  # in standard deviations of a share, at most
    assert spacing <= 0.25
    assert shares * 2 * math.exp(-2 * math.pi**2 / (2 * spacing**2)) < 2.0**-200
    assert shares * (2**-10 * coarser(shares)) ** 2 / 12 < 0.0055  # of the variance


def test_the_sum_of_two_rounded_shares_has_the_law_of_the_text() -> None:
    """A grid of half a standard deviation, where the error is 2 e^(-4 pi^2): the convolution against the formula."""
    spacing, first, second = 0.5, 0.13, -0.31

    def cell(k: int, centre: float) -> mp.mpf:
        edges = [(mp.mpf(k) + side - mp.mpf(centre) / spacing) * spacing for side in (-0.5, 0.5)]
        return (mp.erf(edges[1] / mp.sqrt(2)) - mp.erf(edges[0] / mp.sqrt(2))) / 2

    with mp.workdps(40):
        for k in (0, 3, 9):
            rounded = mp.fsum(cell(j, first) * cell(k - j, second) for j in range(-60, 61))

            def law(v: mp.mpf, k: int = k) -> mp.mpf:  # N of variance 2, plus a uniform number, rounded
                edges = [(mp.mpf(k) + side) * spacing - mp.mpf(first) - mp.mpf(second) - v for side in (-0.5, 0.5)]
                return (mp.erf(edges[1] / 2) - mp.erf(edges[0] / 2)) / 2

            ideal = mp.quad(law, [-spacing / 2, 0, spacing / 2]) / spacing
            assert abs(rounded / ideal - 1) < 2.1 * mp.exp(-4 * mp.pi**2)
