"""The hidden-direction bound: never below the truth, close to it, and above every other admissible law of the signal."""

import math

import numpy as np
import pytest
from scipy import optimize, special, stats

from dpulr import accounting as acc
from dpulr.accounting import hidden_direction as hd
from dpulr.accounting.privacy_cost import curves
from tests.support.accounting_oracle import epsilon_of, log_hyp0f1, log_ratio, nodes, panels, product_nodes

DELTA = 1e-5


def price(noise, dims, rate=1.0, steps=1, **more):
    return acc.hidden_direction_epsilon(noise_multiplier=noise, dims=dims, sample_rate=rate, steps=steps, delta=DELTA, **more)


@pytest.mark.parametrize(
    ("noise", "dims", "rate", "steps", "more", "expected"),
    [
        (1.0, [128], 1.0, 1, {}, 0.343),
        (1.0, [128], 1.0, 1, {"repeats": 4}, 0.262),
        (1.0, [10], 1.0, 1, {}, 1.565),
        (0.5, [128], 1 / 300, 7500, {}, 0.286),
        (2.0, [128, 64, 32, 10], 1 / 120, 3000, {}, 0.269),
        (0.25, [128], 1.0, 1, {"repeats": 4}, 2.456),
        (0.5, [128], 1.0, 1, {"repeats": 4}, 0.706),
        (0.7, [10] * 4, 0.01, 1000, {}, 2.77),
    ],
)
def test_reference_values(noise, dims, rate, steps, more, expected):
    assert price(noise, dims, rate, steps, **more) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("dim", "noise", "rate", "steps"),
    [
        (2, 0.3, 1.0, 1),
        pytest.param(2, 0.5, 0.05, 100, marks=pytest.mark.slow),
        pytest.param(3, 0.4, 0.02, 1000, marks=pytest.mark.slow),
        (10, 2.0, 1.0, 1),
        pytest.param(10, 0.5, 0.01, 1000, marks=pytest.mark.slow),
        (128, 0.2, 1.0, 1),
        pytest.param(128, 30.0, 1.0, 10**6, marks=pytest.mark.slow),
        pytest.param(128, 0.4, 1e-3, 10**4, marks=pytest.mark.slow),
        (1000, 0.3, 0.01, 3000),
        pytest.param(100_000, 0.03, 1e-3, 10**4, marks=pytest.mark.slow),
        (100_000, 0.1, 1.0, 1),
    ],
)
def test_never_below_the_oracle_and_close_to_it(dim, noise, rate, steps):
    exact = epsilon_of(*nodes(dim, noise, fine=4 if steps == 1 else 1), rate, steps, DELTA)
    ours = price(noise, [dim], rate, steps)
    assert exact * (1 - 1e-4) <= ours <= exact * 1.01


def test_layers_and_draws_compose_before_sampling():
    dims, noise, rate, steps = [32, 10], 1.0, 0.01, 2000
    parts = [(*nodes(dim, noise, fine=2), 1) for dim in dims]
    gaussian = (*nodes(1, 3.0, fine=4), 1)
    exact = epsilon_of(*product_nodes([*parts, gaussian], points=4096), rate, steps, DELTA)
    ours = price(noise, dims, rate, steps, gaussian_weights=[1 / 3])
    assert exact * (1 - 1e-4) <= ours <= exact * 1.01


def test_sampling_each_factor_would_understate():
    joint = price(0.7, [10] * 4, 0.01, 1000)
    factors = price(0.7, [10], 0.01, 4000)
    assert joint == pytest.approx(2.77, rel=0.01)
    assert factors == pytest.approx(1.58, rel=0.01)


def test_dimension_one_is_the_gaussian_mechanism():
    for noise, rate, steps in ((1.0, 1.0, 1), (2.0, 0.01, 1000)):
        plain = acc.gaussian_epsilon(noise_multiplier=noise, sample_rate=rate, steps=steps, delta=DELTA)
        assert price(noise, [1], rate, steps) == plain


def test_exact_parts_alone_are_the_gaussian_mechanism():
    """Two exact parts of multipliers 3 and 4 are one of 12/5."""
    release = acc.HiddenDirectionRelease((), (3.0, 4.0))
    ours = acc.epsilon([acc.Charge(acc.SampledStep(release, 0.01), 1000)], DELTA)
    assert ours == pytest.approx(acc.gaussian_epsilon(noise_multiplier=2.4, sample_rate=0.01, steps=1000, delta=DELTA), rel=1e-9)


def test_hiding_never_costs_and_tiny_noise_is_charged_in_full():
    for noise in (0.3, 1.0, 3.0):
        assert price(noise, [64], 0.01, 100) <= acc.gaussian_epsilon(
            noise_multiplier=noise, sample_rate=0.01, steps=100, delta=DELTA
        )
    full = acc.gaussian_epsilon(noise_multiplier=0.01, sample_rate=1e-3, steps=1, delta=1e-2)
    assert full == acc.hidden_direction_epsilon(noise_multiplier=0.01, dims=[64], sample_rate=1e-3, steps=1, delta=1e-2)


# Every admissible law of the signal is dominated: direct integration in the plane and in space.


def bounds(dim, noise):
    release = acc.HiddenDirectionRelease((acc.HiddenSite(dim, noise),))
    both = curves([acc.Charge(acc.SampledStep(release, 1.0), 1)], 1e-9)
    return both.remove.delta, both.add.delta


EPSILONS = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0)


def check_dominated(ratio, p, bound, tight=False):
    """ratio: likelihood ratio at nodes of P-mass p."""
    assert float((p * ratio).sum()) == pytest.approx(1, abs=2e-5)
    for epsilon in EPSILONS:
        a = math.exp(epsilon)
        truths = float((p * np.maximum(ratio - a, 0)).sum()), float((p * np.maximum(1 - a * ratio, 0)).sum())
        for truth, limit in zip(truths, bound, strict=True):
            assert truth <= limit(epsilon) * (1 + 1e-3) + 2e-8
            if tight and truth > 1e-6:
                assert limit(epsilon) <= truth * 1.03


ANGLES = 2 * np.pi * (np.arange(480) + 0.5) / 480


def arcs(*intervals, level):
    """A density on the circle: `level` on the arcs given in turns."""
    turn = ANGLES / (2 * np.pi)
    f = np.zeros_like(ANGLES)
    for start, end in intervals:
        f[(turn >= start) & (turn < end)] = level
    assert f.mean() == pytest.approx(1)
    return f


def plane_ratio(f, noise, bits=None):
    """Likelihood ratio on polar nodes for y = bits(angle) * (cos, sin) with density f."""
    radius, weight = panels(np.linspace(0, 1 / noise + 9, 41), 6)
    p = np.outer(weight * radius * np.exp(-(radius**2) / 2), np.full(720, 1 / 720))
    where = 2 * np.pi * np.arange(720) / 720
    bits = np.ones_like(ANGLES) if bits is None else bits
    cosine = np.cos(where[:, None] - ANGLES) * bits  # where x angles
    ratio = np.empty_like(p)
    for i, r in enumerate(radius):
        ratio[i] = np.exp(r / noise * cosine - bits**2 / (2 * noise**2)) @ f / len(ANGLES)
    return ratio, p


PLANE = {
    "hemisphere": arcs((0, 0.5), level=2),
    "two quarters": arcs((0, 0.25), (0.5, 0.75), level=2),
    "eight arcs": arcs(*[(k / 8, k / 8 + 1 / 16) for k in range(8)], level=2),
    "uniform": np.ones_like(ANGLES),
    "two thirds": arcs((0, 2 / 3), level=1.5),
    "uneven": arcs((0, 0.4), (0.7, 0.8), level=2),
}


@pytest.mark.parametrize("noise", [pytest.param(0.4, marks=pytest.mark.slow), 1.0, pytest.param(3.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PLANE)
def test_plane_densities_are_dominated(name, noise):
    ratio, p = plane_ratio(PLANE[name], noise)
    check_dominated(ratio, p, bounds(2, noise), tight=name == "hemisphere")


BITS = {
    "clipped slope": np.clip(2 * np.cos(ANGLES), -1, 1),
    "half size": 0.5 * np.sign(np.cos(ANGLES)),
    "sometimes zero": np.where(np.abs(np.cos(ANGLES)) > 0.5, np.sign(np.cos(ANGLES)), 0.0),
    "only positive": np.where(np.cos(ANGLES) > 0, 1.0, 0.0),
    "ripples": np.cos(3 * ANGLES),
}


@pytest.mark.parametrize("noise", [0.4, pytest.param(1.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BITS)
def test_plane_fractional_bits_are_dominated(name, noise):
    """b anywhere in [-1, 1], not only at its ends."""
    ratio, p = plane_ratio(np.ones_like(ANGLES), noise, BITS[name])
    check_dominated(ratio, p, bounds(2, noise))


def space_ratio(f, noise):
    """d = 3: density f of the height c (relative to the sphere's, which is uniform on [-1, 1])."""
    c, wc = panels(np.linspace(-1, 1, 25), 8)
    w, ww = panels(np.linspace(-8.5 * noise, 1 + 8.5 * noise, 31), 8)
    s, ws = panels(np.linspace(0, 1 + 8.5 * noise, 21), 8)
    p = np.outer(
        ww * np.exp(-0.5 * (w / noise) ** 2) / math.sqrt(2 * np.pi) / noise, ws * s / noise**2 * np.exp(-0.5 * (s / noise) ** 2)
    )
    radial = np.sqrt(1 - c**2)[:, None] * s / noise**2
    side = special.ive(0, radial) * np.exp(radial - 1 / (2 * noise**2))
    ratio = np.exp(np.outer(w, c) / noise**2) @ (side * (wc * f(c) / 2)[:, None])
    return ratio, p


SPACE = {
    "hemisphere": lambda c: 2.0 * (c > 0),
    "two caps": lambda c: 2.0 * (np.abs(c) > 0.5),
    "belt": lambda c: 2.0 * (np.abs(c) < 0.5),
    "bands": lambda c: 2.0 * (np.floor((c + 1) * 3) % 2 == 1),
    "tilted": lambda c: 1 + c,
}


@pytest.mark.parametrize("noise", [0.4, pytest.param(1.0, marks=pytest.mark.slow), pytest.param(3.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SPACE)
def test_space_densities_are_dominated(name, noise):
    ratio, p = space_ratio(SPACE[name], noise)
    check_dominated(ratio, p, bounds(3, noise), tight=name == "hemisphere")


# Larger dimensions: importance sampling of the output itself.


@pytest.mark.parametrize(
    ("dim", "noise", "epsilon"),
    [
        (5, 0.5, 4.0),
        pytest.param(30, 0.5, 2.0, marks=pytest.mark.slow),
        pytest.param(128, 0.2, 6.0, marks=pytest.mark.slow),
        (128, 1.0, 0.3),
        pytest.param(2000, 0.1, 6.0, marks=pytest.mark.slow),
        pytest.param(20_000, 0.05, 8.0, marks=pytest.mark.slow),
    ],
)
def test_importance_sampled_monte_carlo(dim, noise, epsilon):
    """200,000 draws around the likeliest place of the divergence. False alarm at 4.5 standard errors: below 1e-5 in all."""
    bound = bounds(dim, noise)[0](epsilon)
    k = dim - 1

    def exponent(v):
        w, s = v
        value = float(log_ratio(dim, noise, np.array([w]), np.array([s]))[0, 0])
        if value <= epsilon:
            return 1e3 * (1 + epsilon - value)
        gain = value + math.log(-math.expm1(epsilon - value))
        return -(gain - 0.5 * (w / noise) ** 2 + (k - 1) * math.log(s) - 0.5 * (s / noise) ** 2)

    start = np.array([4 * noise, noise * math.sqrt(k + 1 / noise**2) + 2 * noise])
    best = optimize.minimize(exponent, start, method="Nelder-Mead", options={"xatol": 1e-4 * noise}).x
    rng = np.random.default_rng(5)
    w = best[0] + noise * rng.standard_normal(200_000)
    stretch = max(best[1] / noise / math.sqrt(max(k - 1, 1)), 1.0)
    s = noise * stretch * np.sqrt(rng.chisquare(k, 200_000))
    grid_s = np.linspace(s.min(), s.max(), 400)
    grid_w = np.linspace(w.min(), w.max(), 400)
    from scipy.interpolate import RectBivariateSpline

    loss = RectBivariateSpline(grid_w, grid_s, log_ratio(dim, noise, grid_w, grid_s)).ev(w, s)
    log_weight = stats.norm.logpdf(w, 0, noise) - stats.norm.logpdf(w, best[0], noise)
    log_weight += stats.chi.logpdf(s / noise, k) - (stats.chi.logpdf(s / noise / stretch, k) - math.log(stretch))
    value = np.exp(log_weight) * np.maximum(np.exp(loss) - math.exp(epsilon), 0)
    mean, error = value.mean(), value.std() / math.sqrt(len(value))
    assert error < 0.02 * mean
    assert mean - 4.5 * error <= bound
    assert bound <= (mean + 4.5 * error) * 1.03


# The pieces.


def test_heights_are_stochastically_larger():
    """The rounded height exceeds the true one: its survival function is nowhere lower, and its mean barely higher."""
    for dim in (2, 3, 10, 128, 100_000):
        height, weight, beyond = hd.cap_heights(dim)
        assert weight.sum() + beyond == pytest.approx(1, abs=1e-12)
        assert beyond < 1e-19
        points = height[::97]
        survival = np.array([weight[height >= c].sum() + beyond for c in points])
        assert np.all(survival >= special.betainc((dim - 1) / 2, 0.5, 1 - points**2) - 1e-14)
        mean = math.exp(special.gammaln(dim / 2) - special.gammaln((dim + 1) / 2)) / math.sqrt(math.pi)
        assert mean <= float(np.dot(height, weight)) <= mean * 1.002


def test_cells_hold_the_likelihood_ratio():
    """At the corners of the cells the ratio of the rounded heights brackets the exact one's cell."""
    for dim, noise in ((2, 0.5), (10, 1.0), (500, 0.3)):
        pair = hd.site_cells(dim, noise)
        assert np.all(pair.low <= pair.mean)
        assert np.all(pair.mean <= pair.high)
        assert pair.p.sum() == pytest.approx(1, abs=1e-12)
        assert pair.q.sum() + pair.q_only == pytest.approx(1, abs=1e-9)


def test_oracle_bessel_matches_mpmath():
    import mpmath

    for b, z in ((0.5, 3.0), (1.0, 20.0), (65.0, 40.0), (500.0, 300.0), (50_000.0, 9000.0)):
        exact = float(mpmath.log(mpmath.hyp0f1(b, mpmath.mpf(z) ** 2 / 4)))
        assert float(log_hyp0f1(b, np.array([z]))[0]) == pytest.approx(exact, rel=1e-8, abs=1e-8)


def test_special_functions_keep_their_promise():
    """The margin on heights is far above the error of scipy's incomplete beta; chi-square masses agree with mpmath."""
    import mpmath

    with mpmath.workdps(30):
        for dim in (2, 3, 10, 128, 100_000):
            for height in (0.1 / math.sqrt(dim), 1 / math.sqrt(dim), min(0.99, 5 / math.sqrt(dim))):
                a, x = (dim - 1) / 2, (1 - height) * (1 + height)
                exact = float(mpmath.betainc(a, 0.5, 0, mpmath.mpf(x), regularized=True))
                assert float(special.betainc(a, 0.5, x)) == pytest.approx(exact, rel=hd.HEIGHT_MARGIN / 10)
        for half in (0.5, 4.5, 63.5, 49_999.5):
            middle = math.sqrt(2 * half)
            edges = np.array([max(1e-3, middle - 2), middle + 0.5, middle + 0.55, middle + 5, middle + 5.05]) ** 2
            mass = hd._chi_mass(np.array([[half]]), edges)[0]
            for left, right, value in zip(edges[:-1], edges[1:], mass, strict=True):
                exact = mpmath.gammainc(half, mpmath.mpf(left) / 2, mpmath.mpf(right) / 2, regularized=True)
                assert value == pytest.approx(float(exact), rel=1e-9)
