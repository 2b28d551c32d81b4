"""The paper's formula as printed, its conditions, and that it is never a guarantee."""

import math

import pytest

from dpulr import accounting as acc
from dpulr.paper.nominal import largest_alpha, nominal_of, violated_by


def nominal(**change):
    given = {
        "target_std": 4.0,
        "sample_rate": 1 / 300,
        "steps": 7500,
        "delta": 1e-5,
        "rejection_threshold": 150,
        "dataset_size": 60_000,
        **change,
    }
    return acc.paper_nominal_epsilon(**given)


@pytest.mark.parametrize(("batch", "threshold", "impairment"), [(938, 63, 2.17), (300, 200, 1.39), (120, 500, 0.885)])
def test_the_impairment_of_algorithm_1(batch, threshold, impairment):
    result = acc.paper_nominal(
        target_std=4.0,
        sample_rate=1 / batch,
        steps=25 * batch,
        delta=1e-5,
        rejection_threshold=threshold,
        dataset_size=60_000,
    )
    assert result.impairment == pytest.approx(impairment, rel=0.01)


def test_the_formula_is_below_the_truth_at_small_noise():
    bare = nominal(target_std=0.5, sample_rate=1 / 938, steps=25 * 938, rejection_threshold=1, ignore_conditions=True)
    assert bare == pytest.approx(3.35, rel=0.01)
    assert acc.gaussian_epsilon(noise_multiplier=0.5, sample_rate=1 / 938, steps=25 * 938, delta=1e-5) > 7.0


def test_alpha_stays_where_the_theorem_allows_it():
    """Brute force over alpha, conditions written out again."""
    sigma, q, steps, delta = 4.0, 1 / 300, 7500, 1e-5
    best = math.inf
    for k in range(1, 40_000):
        alpha = 1 + k / 1000
        a = math.log(1 + 1 / (q * (alpha - 1)))
        if alpha > 0.5 * sigma**2 * a - 2 * math.log(sigma):
            continue
        bottom = a + math.log(q * alpha) + 1 / (2 * sigma**2)
        if bottom <= 0 or alpha > (0.5 * sigma**2 * a**2 - math.log(5) - 2 * math.log(sigma)) / bottom:
            continue
        best = min(best, 2 * steps * q**2 * alpha / sigma**2 + math.log(1 / delta) / (alpha - 1))
    assert nominal(rejection_threshold=1) == pytest.approx(best, rel=1e-3)
    assert largest_alpha(sigma, q) < 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_std": 2.0}, "sigma0 is 2"),
        ({"sample_rate": 0.25, "steps": 10}, "q is 0.25"),
        ({"rejection_threshold": 0}, "N_B is 0"),
        ({"rejection_threshold": 400}, "N_B is 400"),
    ],
)
def test_conditions_are_enforced_and_named(change, message):
    with pytest.raises(ValueError, match=message):
        nominal(**change)
    assert nominal(**change, ignore_conditions=True) > 0


def test_no_steps_and_bad_input():
    assert nominal(steps=0) == 0.0
    for change in ({"delta": 2.0}, {"steps": 1.5}, {"target_std": math.nan}, {"dataset_size": 0}):
        with pytest.raises(ValueError):
            nominal(**change)


def test_never_certified():
    """Whatever the formula says, it is no epsilon, and no accountant prices it."""
    step = acc.SampledStep(acc.PaperRelease(4.0), 1 / 300, 150, 59_999)
    spent = acc.privacy_spent([acc.Charge(step, 7500)], 1e-5)
    assert (spent.guarantee, spent.epsilon) == ("nominal", None)
    assert spent.nominal_epsilon == pytest.approx(nominal(), rel=1e-3)  # one record less
    assert math.isinf(acc.epsilon([acc.Charge(step, 7500)], 1e-5))
    for ask in (acc.PaperRelease(4.0).pair, acc.PaperRelease(4.0).equivalent_noise):
        with pytest.raises(ValueError, match="PaperRelease has no"):
            ask()


def test_an_audit_holds_it_to_what_its_proof_takes_it_for():
    assert acc.PaperRelease(4.0).claimed() == acc.GaussianRelease(4.0, mechanism="paper")


def test_conditions_of_steps_that_differ_are_named_once():
    fine = acc.SampledStep(acc.PaperRelease(4.0), 1 / 300, 200, 59_999)
    loud = acc.SampledStep(acc.PaperRelease(3.0), 1 / 300, 200, 59_999)
    assert violated_by([acc.Charge(fine, 10)]) == ()
    assert violated_by([acc.Charge(fine, 10), acc.Charge(loud, 1), acc.Charge(loud, 1)]) == ("sigma0 is 3, but must be at least 4",)
    assert nominal_of([acc.Charge(fine, 10), acc.Charge(acc.Unaccounted("x"), 1)], 1e-5) is None
