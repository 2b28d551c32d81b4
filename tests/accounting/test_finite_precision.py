"""What finite precision costs: the error of numpy's normal numbers, exactly, and the bound that is made of it."""

import itertools
import math
from dataclasses import dataclass, replace

import mpmath as mp
import numpy as np
import pytest
from scipy import special

from dpulr import accounting as acc
from dpulr.accounting import finite_precision
from dpulr.accounting.finite_precision import Slack, slack
from tests.accounting import ziggurat
from tests.accounting.finite_pairs import divergence

DELTA = 1e-5


def gaussian(noise=2.0, rate=1 / 120, numbers=0, **more):
    return acc.SampledStep(acc.GaussianRelease(noise, numbers=numbers), rate, **more)


def hidden(noise=0.7, rate=1 / 120, numbers=0):
    return acc.SampledStep(replace(acc.hidden_direction_release(noise, [32, 10]), numbers=numbers), rate)


# --- the error of one number ---------------------------------------------------------------------------------------------
def test_the_algorithm_below_is_the_one_numpy_runs():
    """The same numbers from the same bits, up to the rounding of the tables; the tail (3e-4) occurs some 15 times."""
    ours = ziggurat.draws(np.random.SFC64(3), 50_000)
    theirs = np.random.Generator(np.random.SFC64(3)).standard_normal(50_000)
    assert np.abs(ours - theirs).max() < 1e-14
    assert (np.abs(ours) > ziggurat.R).sum() > 5


@pytest.mark.parametrize("place", [0.01, 0.7, 1.9, 3.1, 3.6, 3.65, 3.7, 5.0, 7.0, 9.0, 11.0])
def test_the_probability_of_a_cell_is_close_to_the_ideal_one(place):
    rng = np.random.default_rng(int(100 * place))
    for scale in 2 ** rng.uniform(0, 1, 6):
        low = place * scale + rng.uniform(-1, 1) * 2**-7
        computed, left_open = ziggurat.probability(low, low + 2**-10, float(scale))
        near, far = (mp.mpf(edge) / scale / mp.sqrt(2) for edge in (low, low + 2**-10))
        ideal = (mp.erfc(near) - mp.erfc(far)) / 2
        x = float(low / scale)
        allowed = finite_precision.PER_NUMBER + (finite_precision._error_at(x) if x > ziggurat.R else 0)
        assert (abs(computed - ideal) + left_open) / ideal < allowed


def test_far_out_the_error_is_as_large_as_said():
    """One value more or less per cell: at 9 standard deviations 2^-16 of the probability, where 2^-38 would be too little."""
    rng = np.random.default_rng(0)
    errors = []
    for low in 9 + rng.uniform(0, 1e-2, 20):
        computed, _ = ziggurat.probability(low, low + 2**-10, 1.0)
        errors.append(abs(float(computed / ((mp.erfc(low / mp.sqrt(2)) - mp.erfc((low + 2**-10) / mp.sqrt(2))) / 2)) - 1))
    assert finite_precision._error_at(9.0) / 50 < max(errors) < finite_precision._error_at(9.02)


# --- the bound that is made of it ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("rate", [0.1, 0.4, 1.0])
@pytest.mark.parametrize("error", [0.003, 0.03])
def test_the_bound_holds_for_every_error_of_a_small_mechanism(monkeypatch, rate, error):
    """Three outcomes, four sampled steps, all sign patterns of the error: divergences of the computed run stay within the bound."""
    monkeypatch.setattr(finite_precision, "PER_NUMBER", error)
    monkeypatch.setattr(finite_precision, "AT_TAIL", 1e-12)
    p, r, steps, mass = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.3, 0.4]), 4, 1e-3
    bound = slack([acc.Charge(gaussian(2.0, rate, numbers=1), steps)], mass)
    assert bound.loss < 2.2 * error * steps + 0.3

    def run(without, with_it):
        one, two = without, (1 - rate) * without + rate * with_it
        whole_p, whole_q = np.ones(1), np.ones(1)
        for _ in range(steps):
            whole_p, whole_q = np.outer(whole_p, one).ravel(), np.outer(whole_q, two).ravel()
        return whole_p, whole_q

    def moved(law, signs):
        law = law * np.exp(error * 0.5 * np.array(signs))
        return law / law.sum()  # the sum is within e^(+-error / 2) too

    ideal_p, ideal_q = run(p, r)
    for signs in itertools.product((-1, 1), repeat=6):
        computed_p, computed_q = run(moved(p, signs[:3]), moved(r, signs[3:]))
        for a in (1.0, 1.2, 2.0, 5.0):
            for (top, under), (true_top, true_under) in (
                ((ideal_q, ideal_p), (computed_q, computed_p)),
                ((ideal_p, ideal_q), (computed_p, computed_q)),
            ):
                allowed = math.exp(bound.factor) * (divergence(under, top, a * math.exp(-bound.loss)) + mass)
                assert divergence(true_under, true_top, a) <= allowed


def test_without_rounding_nothing_is_added():
    charges = [acc.Charge(gaussian(), 3000), acc.Charge(hidden(), 10), acc.Charge(acc.Unaccounted("a hole"), 1)]
    assert slack(charges, 1e-9) == Slack(0.0, 0.0, 0.0)
    assert Slack().room(DELTA) == DELTA


@pytest.mark.parametrize(("make", "numbers"), [(gaussian, 1), (gaussian, 10**5), (gaussian, 10**9), (hidden, 500), (hidden, 10**6)])
def test_every_price_includes_it(make, numbers):
    """Epsilon, its inverse, the profile, calibration and the number of steps: never below the ideal release, and close to it."""
    ideal, rounded = [acc.Charge(make(), 600)], [acc.Charge(make(numbers=numbers), 600)]
    for delta in (1e-8, 1e-5, 1e-2):
        plain, full = acc.epsilon(ideal, delta), acc.epsilon(rounded, delta)
        assert plain < full < 1.01 * plain + 60 * 2 * numbers * finite_precision.PER_NUMBER + 1e-3
        assert acc.privacy_profile(rounded, [delta]) == [(delta, full)]
        assert acc.delta_at(ideal, full) < delta
        assert acc.delta_at(rounded, full) > acc.delta_at(ideal, full)
        assert acc.epsilon(rounded, max(acc.delta_at(rounded, full), 1e-12)) < 1.02 * full + 1e-3
    target = 1.5 * acc.epsilon(rounded, DELTA)
    step = rounded[0].step
    assert acc.max_steps(step, target_epsilon=target, delta=DELTA) <= acc.max_steps(
        ideal[0].step, target_epsilon=target, delta=DELTA
    )
    most = acc.max_steps(step, target_epsilon=target, delta=DELTA)
    assert acc.epsilon([acc.Charge(step, most)], DELTA) <= target


def test_calibration_includes_it():
    common = {"target_epsilon": 1.0, "delta": DELTA, "sample_rate": 0.01, "steps": 600}
    noise = acc.calibrate_release(lambda noise: acc.GaussianRelease(noise, numbers=10**9), **common)
    assert acc.epsilon([acc.Charge(gaussian(noise, 0.01, numbers=10**9), 600)], DELTA) <= 1.0
    assert noise > acc.calibrate(**common)


def test_the_cross_check_and_rejection_include_it():
    for method in ("pld", "rdp"):
        ideal = acc.epsilon([acc.Charge(hidden(), 100)], DELTA, method)
        assert ideal < acc.epsilon([acc.Charge(hidden(numbers=10**7), 100)], DELTA, method) < 1.02 * ideal + 1e-2
    redrawn = {"rejection_threshold": 366, "min_dataset_size": 59_999}
    ideal = acc.epsilon([acc.Charge(gaussian(**redrawn), 3000)], DELTA)
    assert ideal < acc.epsilon([acc.Charge(gaussian(numbers=10**5, **redrawn), 3000)], DELTA) < 1.001 * ideal


def test_it_grows_with_everything():
    def loss(numbers=10**5, rate=0.01, steps=600, noise=1.0, mass=1e-9):
        found = slack([acc.Charge(gaussian(noise, rate, numbers=numbers), steps)], mass)
        return found.loss, found.factor

    base = loss()
    for dearer in (loss(numbers=10**6), loss(steps=6000), loss(mass=1e-12)):
        assert dearer[0] > base[0]
        assert dearer[1] > base[1]
    assert loss(rate=0.1)[0] > base[0]
    assert loss(noise=0.5)[0] > base[0]
    halves = slack(
        [acc.Charge(gaussian(1.0, 0.01, 10**5), 300), acc.Charge(gaussian(1.0, 0.01, 10**5, min_dataset_size=9), 300)], 1e-9
    )
    assert (halves.loss, halves.factor) == pytest.approx(base)


def test_a_record_costs_only_where_it_takes_part():
    """600 steps at rate 1/120: five of them on average, and hardly ever more than 30."""
    numbers = 10**7
    loss = slack([acc.Charge(gaussian(numbers=numbers), 600)], 1e-9).loss
    per_step = 2 * numbers * finite_precision.PER_NUMBER
    assert 5 * per_step < loss < 35 * per_step


@pytest.mark.parametrize(("noise", "numbers"), [(0.1, 1), (1e-3, 100), (2.0, 10**17)])
def test_where_no_bound_is_known_epsilon_is_infinite(noise, numbers):
    """Noise so small that a record moves a number to where numpy's normals are too sparse; or too many numbers."""
    charges = [acc.Charge(gaussian(noise, 0.5, numbers=numbers), 10)]
    assert math.isinf(acc.epsilon(charges, DELTA))
    assert acc.delta_at(charges, 1.0) == 1.0
    assert acc.guarantee_of(charges, DELTA) == "none"


@pytest.mark.parametrize("dim", [2, 3, 10, 128, 5000])
@pytest.mark.parametrize("log_odds", [0.5, 3.0, 20.0, 60.0])
def test_a_hidden_direction_rarely_moves_a_number_far(dim, log_odds):
    """One draw: the exact tail of a coordinate on the sphere."""
    reach = acc.HiddenSite(dim, 0.5).shift.within(log_odds) * 0.5
    assert float(special.betainc((dim - 1) / 2, 0.5, max(0.0, 1 - reach**2))) <= math.exp(-log_odds)


@pytest.mark.slow
def test_several_hidden_directions_rarely_move_a_number_far():
    """Eight draws in 16 dimensions, 200,000 times: the tails e^-3 and e^-6 are exceeded less often than that."""
    site = acc.HiddenSite(16, 2.0, 8)
    z = np.random.default_rng(1).standard_normal((200_000, 8, 16))
    moved = (np.abs(z[..., 0]) / np.linalg.norm(z, axis=2)).mean(axis=1) / 2.0
    for log_odds in (3.0, 6.0):
        assert (moved > site.shift.within(log_odds)).mean() <= math.exp(-log_odds)
    assert moved.mean() == pytest.approx(site.shift.mean, rel=0.01)
    assert site.shift.largest == 0.5
    assert acc.HiddenSite(1, 2.0).shift == acc.Shift(0.5)


def test_hidden_directions_need_less_noise_than_known_ones():
    """At a noise of 0.3 a known direction can be moved too far for numpy's normals; hidden ones in 32 dimensions can't."""
    release = replace(acc.hidden_direction_release(0.25, [32] * 3, repeats=8), numbers=10**5)
    assert slack([acc.Charge(acc.SampledStep(release, 0.01), 600)], 1e-7).loss < 0.01
    assert slack([acc.Charge(gaussian(0.25, 0.01, numbers=10**5), 600)], 1e-7).loss > 0.1


def test_numbers_are_checked_kept_and_read_from_older_ledgers():
    for value in (-1, 1.5, True, "3"):
        with pytest.raises(ValueError, match="numbers"):
            acc.GaussianRelease(2.0, numbers=value)
        with pytest.raises(ValueError, match="numbers"):
            acc.HiddenDirectionRelease((), (2.0,), numbers=value)
    for step in (gaussian(numbers=7), hidden(numbers=7)):
        assert step.release.scaled(2.0).numbers == 7
        ledger = acc.Ledger([acc.Charge(step, 3)])
        assert acc.Ledger.from_dict(ledger.to_dict()) == ledger
    old = {"kind": "gaussian", "noise_multiplier": 2.0, "mechanism": "gaussian"}
    assert acc.events.from_dict(old) == acc.GaussianRelease(2.0)


def test_a_release_of_ones_own_must_say_how_far_a_record_moves_it():
    @dataclass(frozen=True)
    class Mine(acc.Release):
        kind = "mine-with-numbers"
        numbers: int = 5

        def pair(self):
            return acc.GaussianRelease(2.0).pair()

    acc.register_release(Mine)
    with pytest.raises(ValueError, match="how far a record moves"):
        acc.epsilon([acc.Charge(acc.SampledStep(Mine(), 0.1), 3)], DELTA)
    assert acc.epsilon([acc.Charge(acc.SampledStep(Mine(0), 0.1), 3)], DELTA) == acc.epsilon(
        [acc.Charge(gaussian(2.0, 0.1), 3)], DELTA
    )
