"""What a run has spent, in words: certified, nominal or nothing, and why."""

import math

import pytest

from dpulr import accounting as acc
from dpulr.accounting import statement
from dpulr.accounting.rounding import up

STEP = acc.SampledStep(acc.GaussianRelease(2.0), 1 / 120)


def test_statement_of_a_certified_run():
    spent = acc.privacy_spent([acc.Charge(STEP, 3000)], 1e-5)
    assert spent.guarantee == "certified"
    assert spent.epsilon == acc.epsilon([acc.Charge(STEP, 3000)], 1e-5)
    text = str(spent)
    for part in (
        "epsilon = 0.916",
        "delta = 1e-05",
        "adding or removing one record",
        "unit is one record",
        "gaussian",
        "Assumed: Poisson sampling",
        "Not covered",
        "hyper-parameters",
        "accuracies",
        "time",
    ):
        assert part in text
    shown = float(text.split("epsilon = ")[1].split(" ")[0])
    assert shown >= spent.epsilon


def test_statement_mentions_directions_and_rejection():
    step = acc.SampledStep(acc.hidden_direction_release(1.0, [10]), 0.01, 30, 5999)
    text = str(acc.privacy_spent([acc.Charge(step, 100)], 1e-5))
    assert "directions" in text
    assert "redrawn" in text


def test_statements_without_a_guarantee():
    spent = acc.privacy_spent([acc.Charge(STEP, 10)], 1e-5, reasons=["the noise was seeded"])
    assert (spent.guarantee, spent.epsilon) == ("none", None)
    assert "the noise was seeded" in str(spent)
    spent = acc.privacy_spent([acc.Charge(acc.Unaccounted("batches were shuffled"), 1)], 1e-5)
    assert (spent.guarantee, spent.epsilon) == ("none", None)
    assert "batches were shuffled" in str(spent)
    rejecting = acc.SampledStep(acc.GaussianRelease(2.0), 1 / 120, 500, 59_999)
    spent = acc.privacy_spent([acc.Charge(rejecting, 3000)], 1e-5)
    assert (spent.guarantee, spent.epsilon) == ("none", None)
    nothing = acc.privacy_spent([], 1e-5)
    assert (nothing.guarantee, nothing.epsilon) == ("certified", 0.0)


def test_the_mechanism_names_itself():
    """Zeroth-order releases are Gaussian, and are still called by their name."""
    step = acc.SampledStep(acc.GaussianRelease(2.0, mechanism="zeroth-order"), 1 / 120)
    spent = acc.privacy_spent([acc.Charge(step, 3000)], 1e-5)
    assert spent.mechanism == "zeroth-order"
    assert "3000 steps of the zeroth-order mechanism" in str(spent)
    assert "gaussian" not in str(spent)
    assert spent.epsilon == acc.privacy_spent([acc.Charge(STEP, 3000)], 1e-5).epsilon


def test_secrets_of_several_mechanisms_are_listed_once():
    hidden = acc.SampledStep(acc.hidden_direction_release(1.0, [10]), 0.01)
    for charges in ([acc.Charge(STEP, 1), acc.Charge(hidden, 1)], [acc.Charge(hidden, 1), acc.Charge(STEP, 1)]):
        assert acc.privacy_spent(charges, 1e-5).secrets == "noise, directions and batches"
    assert "secret noise and batches from" in str(acc.privacy_spent([acc.Charge(STEP, 1)], 1e-5))


PAPER = {"sample_rate": 1 / 120, "rejection_threshold": 500, "min_dataset_size": 59_999}


def paper(sigma=4.0, reasons=(), **change):
    return acc.Charge(acc.SampledStep(acc.PaperRelease(sigma, 4, reasons), **{**PAPER, **change}), 3000)


def test_the_paper_as_printed_is_nominal():
    spent = acc.privacy_spent([paper()], 1e-5)
    assert (spent.guarantee, spent.epsilon, spent.reasons) == ("nominal", None, ())
    assert spent.nominal_epsilon == pytest.approx(2.09, rel=0.01)
    assert "Nominal epsilon 2.09" in str(spent)
    assert "no guarantee" in str(spent)


@pytest.mark.parametrize(
    ("charge", "message"),
    [
        (paper(sigma=2.0), "sigma0 is 2, but must be at least 4"),
        (paper(sample_rate=0.25), "q is 0.25, but must be at most 1/5"),
        (paper(rejection_threshold=501), "N_B is 501, but must lie between 1 and qN = 500"),
        (paper(rejection_threshold=0, min_dataset_size=None), "no batch is redrawn"),
        (paper(reasons=("batches were shuffled",)), "batches were shuffled"),
    ],
)
def test_the_paper_otherwise_is_nothing(charge, message):
    spent = acc.privacy_spent([charge], 1e-5)
    assert (spent.guarantee, spent.epsilon) == ("none", None)
    assert spent.nominal_epsilon > 0
    assert spent.reasons[0].startswith("layers are clipped one by one")
    assert message in str(spent)
    assert "(nominal, no guarantee)" in str(spent)


@pytest.mark.parametrize("other", [acc.Charge(STEP, 1), acc.Charge(acc.Unaccounted("a hole"), 1)])
def test_the_formula_says_nothing_about_other_steps(other):
    spent = acc.privacy_spent([paper(), other], 1e-5)
    assert (spent.guarantee, spent.epsilon, spent.nominal_epsilon) == ("none", None, None)


def test_reasons_void_the_nominal_value_too():
    spent = acc.privacy_spent([paper()], 1e-5, reasons=["the noise was seeded"])
    assert spent.guarantee == "none"
    assert "the noise was seeded" in spent.reasons


def test_the_statement_names_what_was_checked_and_what_was_taken_as_public():
    charges = [acc.Charge(STEP, 3000)]
    schema = "float32 of shape (1, 28, 28) and int64 of shape ()"
    plain = str(acc.privacy_spent(charges, 1e-5))
    full = str(acc.privacy_spent(charges, 1e-5, public_size=60_000, schema=schema))
    for text in (plain, full):
        assert "a record's loss depends on that record alone (checked on synthetic inputs, not proved)" in text
        assert "a batch that is redrawn and a record whose pass raises an error" in text
        assert len(text) < 6 * 160
    assert f"the number of records (60,000) and the shapes and types of a record ({schema}) taken as public" in full
    assert "public" not in plain
    assert "records (50) taken as public" in str(acc.privacy_spent(charges, 1e-5, public_size=50))
    assert "record (int8) taken as public" in str(acc.privacy_spent(charges, 1e-5, schema="int8"))


def test_certified_means_a_finite_epsilon():
    """No noise to speak of, or rejection: the price is infinite, and the word is "none" before the first step as after it."""
    for step in (acc.SampledStep(acc.GaussianRelease(1e-3), 0.01), acc.SampledStep(acc.GaussianRelease(2.0), 1 / 120, 500, 59_999)):
        charges = [acc.Charge(step, 3000)]
        assert acc.guarantee_of(charges, 1e-5) == acc.privacy_spent(charges, 1e-5).guarantee == "none"
    assert acc.guarantee_of([acc.Charge(STEP, 3000)], 1e-5) == "certified"
    assert acc.guarantee_of([], 1e-5) == "certified"
    assert acc.guarantee_of([acc.Charge(acc.Unaccounted("a hole"), 1)], 1e-5) == "none"
    assert acc.guarantee_of([paper()], 1e-5) == acc.privacy_spent([paper()], 1e-5).guarantee == "nominal"
    rejecting = [acc.Charge(acc.SampledStep(acc.GaussianRelease(2.0), 1 / 120, 420, 59_999), 3000)]
    assert [acc.guarantee_of(rejecting, delta) for delta in (1e-5, 0.4)] == ["none", "certified"]


def test_the_guarantee_of_the_same_charges_is_priced_once(monkeypatch):
    step = acc.SampledStep(acc.GaussianRelease(1.9), 0.01)
    assert acc.guarantee_of([acc.Charge(step, 40)], 1e-5) == "certified"
    monkeypatch.setattr(statement, "price", lambda *_: pytest.fail("priced again"))
    assert acc.guarantee_of([acc.Charge(step, 30), acc.Charge(step, 10)], 1e-5) == "certified"


def test_a_stop_on_the_way_is_told_with_both_epsilons():
    taken = [acc.Charge(STEP, 1000)]
    spent, planned = acc.privacy_spent(taken, 1e-5).epsilon, acc.planned_epsilon(taken, STEP, 3000, 1e-5)
    assert planned == acc.privacy_spent([acc.Charge(STEP, 3000)], 1e-5).epsilon > spent
    assert acc.planned_epsilon(taken, STEP, 1000, 1e-5) == acc.planned_epsilon(taken, STEP, 7, 1e-5) == spent
    assert acc.planned_epsilon(taken, acc.Unaccounted("a hole"), 1001, 1e-5) is None
    text = acc.stopped_early(spent, planned)
    assert f"epsilon {up(spent)} for the steps taken, {up(planned)} for all planned steps" in text
    assert "depends on what was seen" in text
    assert acc.stopped_early(None, None) == acc.stopped_early(0.3, None) == ""


@pytest.mark.parametrize(
    ("epsilon", "delta", "records", "words"),
    [
        (1.0, 1e-5, 60_000, []),
        (1.0, 1e-5, 100_000, []),
        (1.0, 1e-5, 100_001, ["above 1 / 100,001"]),
        (1.0, 1e-3, 300, []),
        (1.0, 1e-3, 299, ["299 records"]),
        (10.0, 1e-5, 1000, []),
        (10.001, 1e-5, 1000, ["epsilon is 10.01"]),
        (math.inf, 0.1, 20, ["above 1 / 20", "20 records", "epsilon is infinity"]),
        (None, 1e-5, 1000, []),
    ],
)
def test_warnings(epsilon, delta, records, words):
    found = acc.warnings_for(epsilon, delta, records)
    assert len(found) == len(words)
    for text, word in zip(found, words, strict=True):
        assert word in text
        assert text.endswith(".")
        assert text.count(". ") == 0
