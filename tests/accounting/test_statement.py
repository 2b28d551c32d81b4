"""Ledgers, statements in words, the cache on disk, and what the package imports."""

import json
import math
import os
import subprocess
import sys

import pytest

from dpulr import accounting as acc
from dpulr.accounting import cache

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


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DPULR_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "WORTH_KEEPING_SECONDS", 0.0)
    return tmp_path


def test_cache_keeps_and_finds(cache_folder):
    assert cache.remember("epsilon", {"a": 1}, lambda: 2.5) == 2.5
    assert cache.remember("epsilon", {"a": 1}, lambda: pytest.fail("not cached")) == 2.5
    assert cache.remember("epsilon", {"a": 2}, lambda: math.inf) == math.inf
    assert cache.remember("epsilon", {"a": 2}, lambda: 1.0) == math.inf
    assert cache.remember("other", {"a": 1}, lambda: 3.5) == 3.5


@pytest.mark.parametrize("damage", ["", "{", "{}", '{"of": 1, "value": "0.1", "digest": "x"}', "\x00\x01", "[1, 2]"])
def test_damaged_cache_files_are_ignored(cache_folder, damage):
    cache.remember("epsilon", {"a": 1}, lambda: 2.5)
    (file,) = cache_folder.iterdir()
    file.write_text(damage)
    assert cache.remember("epsilon", {"a": 1}, lambda: 7.0) == 7.0


def test_an_edited_value_is_ignored(cache_folder):
    cache.remember("epsilon", {"a": 1}, lambda: 2.5)
    (file,) = cache_folder.iterdir()
    file.write_text(file.read_text().replace("2.5", "0.1"))
    assert cache.remember("epsilon", {"a": 1}, lambda: 2.5) == 2.5


def test_cache_off_and_unwritable(cache_folder, monkeypatch):
    (cache_folder / "file").write_text("")
    monkeypatch.setenv("DPULR_CACHE", str(cache_folder / "file" / "below"))
    assert cache.remember("epsilon", {"a": 1}, lambda: 2.5) == 2.5
    monkeypatch.setenv("DPULR_CACHE", "off")
    assert cache.folder() is None


def test_no_torch_and_a_quick_start():
    """In a fresh interpreter: every module of the package, and a price, without torch."""
    code = (
        "import sys, pkgutil, importlib, dpulr.accounting as a\n"
        "assert 'scipy' not in sys.modules and 'numpy' not in sys.modules\n"
        "for m in pkgutil.iter_modules(a.__path__): importlib.import_module(a.__name__ + '.' + m.name)\n"
        "a.gaussian_epsilon(noise_multiplier=2.0, sample_rate=0.01, steps=10, delta=1e-5)\n"
        "for name in a.__all__: getattr(a, name)\n"
        "assert callable(a.calibrate)\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "DPULR_CACHE": "off"})
