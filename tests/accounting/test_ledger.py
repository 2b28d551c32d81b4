"""The ledger of a run: it only grows, merges equal steps, reads what it wrote, and refuses the rest."""

import json

import pytest

from dpulr import accounting as acc

STEP = acc.SampledStep(acc.GaussianRelease(2.0), 1 / 120)


def test_ledger_round_trip_and_merging():
    ledger = acc.Ledger()
    for _ in range(3):
        ledger.append(STEP)
    ledger.append(acc.SampledStep(acc.hidden_direction_release(1.0, [10]), 0.01), 5)
    ledger.append(STEP, 2)
    assert [charge.count for charge in ledger.charges] == [5, 5]
    assert ledger.steps == 10
    again = acc.Ledger.from_dict(json.loads(json.dumps(ledger.to_dict())))
    assert again == ledger
    assert again.epsilon(1e-5) == ledger.epsilon(1e-5)


def test_ledger_fails_closed():
    ledger = acc.Ledger([acc.Charge(STEP, 1)])
    data = ledger.to_dict()
    for broken in ({**data, "format": 2}, {**data, "charges": [{"kind": "new"}]}, {"charges": []}):
        with pytest.raises(ValueError):
            acc.Ledger.from_dict(broken)
    with pytest.raises(ValueError, match="not a step"):
        ledger.append("free")
    with pytest.raises(ValueError):
        ledger.append(STEP, -1)


def ledger_of_version_0_1_0(**site):
    """As that version wrote it: a Gaussian release has no mechanism, a site has a frame."""
    hidden = {"kind": "hidden-direction", "sites": [{"kind": "hidden-site", "dim": 10, "noise_ratio": 1.0, "repeats": 4, **site}]}
    gaussian = {"kind": "gaussian", "noise_multiplier": 2.0}
    paper = {"kind": "paper", "target_std": 4.0, "layers": 4}
    steps = [
        {"kind": "sampled-step", "release": release, "sample_rate": 0.01, "rejection_threshold": 0, "min_dataset_size": None}
        for release in ({**hidden, "gaussian": []}, gaussian, paper)
    ]
    return {"format": 1, "charges": [{"kind": "charge", "step": step, "count": 3} for step in steps]}


def test_ledgers_of_version_0_1_0_are_read():
    ledger = acc.Ledger.from_dict(ledger_of_version_0_1_0(frame=1))
    releases = [charge.step.release for charge in ledger.charges]
    assert releases == [acc.hidden_direction_release(1.0, [10], repeats=4), acc.GaussianRelease(2.0), acc.PaperRelease(4.0, 4)]
    assert [release.mechanism for release in releases] == ["hidden-direction", "gaussian", "paper"]


@pytest.mark.parametrize("frame", [2, 0, True, "1", None])
def test_frames_of_version_0_1_0_are_refused(frame):
    with pytest.raises(ValueError, match=r"only version 0\.1\.0"):
        acc.Ledger.from_dict(ledger_of_version_0_1_0(frame=frame))
