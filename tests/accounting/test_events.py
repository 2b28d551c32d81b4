"""Events are values: equal, hashable, JSON-able; anything unknown or impossible is refused in a plain sentence."""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from dpulr import accounting as acc
from dpulr.accounting import events
from dpulr.accounting.dominating_pairs import atoms

SAMPLES = [
    acc.GaussianRelease(2.0),
    acc.HiddenDirectionRelease((acc.HiddenSite(128, 0.5, 4), acc.HiddenSite(10, 1.0)), (3.0,)),
    acc.PaperRelease(4.0, 4, ("batches were shuffled",)),
    acc.GaussianRelease(2.0, mechanism="zeroth-order"),
    acc.Unaccounted("shuffled batches"),
    acc.SampledStep(acc.GaussianRelease(2.0), 0.01, 5, 1000),
    acc.Charge(acc.SampledStep(acc.PaperRelease(4.0), 0.01), 7),
    acc.Charge(acc.Unaccounted("seeded noise"), 1),
]


@pytest.mark.parametrize("event", SAMPLES, ids=lambda e: type(e).__name__)
def test_round_trip_through_json(event):
    assert events.from_dict(json.loads(json.dumps(events.to_dict(event)))) == event
    assert hash(event) == hash(events.from_dict(events.to_dict(event)))


@pytest.mark.parametrize("event", SAMPLES, ids=lambda e: type(e).__name__)
def test_events_cannot_be_changed(event):
    field = dataclasses.fields(event)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(event, field, 1)


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "laplace", "scale": 1.0},
        {"noise_multiplier": 2.0},
        {"kind": ["gaussian"]},
        {"kind": "gaussian", "noise_multiplier": 2.0, "discount": 0.5},
        {"kind": "gaussian"},
        {"kind": "charge", "count": 3, "step": {"kind": "other"}},
        {"kind": "sampled-step", "sample_rate": 0.1, "release": {"kind": "unaccounted", "reason": "x"}},
    ],
)
def test_unknown_events_fail_closed(data):
    with pytest.raises(ValueError):
        events.from_dict(data)


def test_unknown_release_has_no_price():
    with pytest.raises(ValueError, match="not a release"):
        acc.SampledStep("gaussian", 0.1)
    with pytest.raises(ValueError, match="not a charge"):
        acc.epsilon(["gaussian"], 1e-5)


def test_releases_state_their_facts():
    gaussian, hidden = acc.GaussianRelease(2.0), acc.HiddenDirectionRelease((acc.HiddenSite(10, 2.0, 4),), (3.0,))
    assert (gaussian.mechanism, hidden.mechanism, acc.PaperRelease(4.0).mechanism) == ("gaussian", "hidden-direction", "paper")
    assert (gaussian.secrets, hidden.secrets) == ("noise and batches", "noise, directions and batches")
    assert gaussian.certified
    assert hidden.certified
    assert not acc.PaperRelease(4.0).certified
    assert gaussian.equivalent_noise() == 2.0
    assert acc.GaussianRelease(2.0, "zeroth-order").scaled(1.5) == acc.GaussianRelease(3.0, "zeroth-order")
    assert hidden.scaled(0.5) == acc.HiddenDirectionRelease((acc.HiddenSite(10, 1.0, 4),), (1.5,))
    assert gaussian.claimed() is gaussian
    for cells in (gaussian.pair(), hidden.pair()):
        assert cells.p.sum() == pytest.approx(1)
        assert cells.q.sum() == pytest.approx(1)


# A release from outside the package: registered, charged, written, read, priced, stated. No file of the package knows it.


@acc.register_release
@dataclasses.dataclass(frozen=True)
class Coin(acc.Release):
    """Tells by a biased coin whether the record is there; `bias` is the log of the odds."""

    kind = "coin"
    secrets = "coins and batches"
    bias: float

    def pair(self):
        heads = 1 / (1 + math.exp(-self.bias))
        p, q = np.array([heads, 1 - heads]), np.array([1 - heads, heads])
        return atoms(np.log(q / p), p, q)

    def equivalent_noise(self):
        return 2 / self.bias

    def scaled(self, factor):
        return Coin(self.bias / factor)


def test_a_release_from_outside():
    step = acc.SampledStep(Coin(0.5), 1.0)
    assert acc.epsilon([acc.Charge(step, 1)], 1e-9) == pytest.approx(0.5, rel=1e-3)
    ledger = acc.Ledger([acc.Charge(step, 7), acc.Charge(acc.SampledStep(acc.GaussianRelease(5.0), 0.1), 3)])
    again = acc.Ledger.from_dict(json.loads(json.dumps(ledger.to_dict())))
    assert again == ledger
    assert again.certified
    spent = acc.privacy_spent([acc.Charge(step, 7)], 1e-5)
    assert spent.guarantee == "certified"
    assert spent.epsilon <= 3.51
    assert "7 steps of the coin mechanism" in str(spent)
    assert "secret coins and batches" in str(spent)
    assert acc.epsilon([acc.Charge(step, 20)], 1e-5) <= acc.epsilon([acc.Charge(step, 20)], 1e-5, "rdp")
    noise = acc.calibrate_release(lambda noise: Coin(1 / noise), target_epsilon=1.0, delta=1e-5, sample_rate=0.1, steps=30)
    assert acc.epsilon([acc.Charge(acc.SampledStep(Coin(1 / noise), 0.1), 30)], 1e-5) <= 1.0
    assert acc.max_steps(step, target_epsilon=3.01, delta=1e-9) == 6
    assert Coin(0.5).log_ratio(np.zeros(1), np.zeros(1)) is None


def test_what_can_not_be_registered():
    @dataclasses.dataclass(frozen=True)
    class NoPair(acc.Release):
        kind = "no-pair"

    @dataclasses.dataclass
    class NotFrozen(acc.Release):
        kind = "not-frozen"
        certified = False

    @dataclasses.dataclass(frozen=True)
    class Nameless(Coin):
        pass

    @dataclasses.dataclass(frozen=True)
    class Impostor(acc.Release):
        kind = "gaussian"
        certified = False

    @dataclasses.dataclass(frozen=True)
    class PaperImpostor(acc.Release):
        kind = "paper"
        certified = False

    for cls, message in (
        (NoPair, "no method `pair`"),
        (NotFrozen, "frozen dataclass"),
        (Nameless, "of its own"),
        (Impostor, "GaussianRelease has already"),
        (PaperImpostor, "PaperRelease has already"),
        (int, "derive from accounting.Release"),
    ):
        with pytest.raises(ValueError, match=message):
            acc.register_release(cls)
    with pytest.raises(ValueError, match="Nameless is not an event this version knows"):
        acc.epsilon([acc.Charge(acc.SampledStep(Nameless(0.5), 0.1), 1)], 1e-5)


def test_the_paper_is_found_when_a_ledger_names_it():
    code = (
        "from dpulr.accounting import events\n"
        "import sys\n"
        "assert 'dpulr.paper.nominal' not in sys.modules\n"
        "assert events.from_dict({'kind': 'paper', 'target_std': 4.0}).mechanism == 'paper'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
