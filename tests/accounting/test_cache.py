"""The cache on disk: it keeps what was slow, and ignores what is damaged."""

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from dpulr import accounting as acc
from dpulr.accounting import cache, privacy_cost
from dpulr.errors import BudgetError


@pytest.fixture(autouse=True)
def nothing_in_memory():
    """What earlier tests have priced must not answer for the disk."""
    privacy_cost._computed.cache_clear()


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


def test_where_the_cache_is(monkeypatch, tmp_path):
    pytest.importorskip("platformdirs")
    monkeypatch.delenv("DPULR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if os.name == "posix":
        assert cache.folder() == tmp_path / "dpulr" / f"accounting-{cache.VERSION}"


def test_only_our_own_releases_are_kept(cache_folder):
    """A release from outside may change its pair from one run to the next under the same name."""

    @acc.register_release
    @dataclass(frozen=True)
    class Foreign(acc.Release):
        kind = "foreign-to-the-cache"
        noise: float

        def pair(self):
            return acc.GaussianRelease(self.noise).pair()

    acc.epsilon([acc.Charge(acc.SampledStep(Foreign(2.0), 0.01), 10)], 1e-5)
    assert not list(cache_folder.iterdir())
    acc.epsilon([acc.Charge(acc.SampledStep(acc.GaussianRelease(2.0), 0.01), 10)], 1e-5)
    assert len(list(cache_folder.iterdir())) == 1


def plant(folder, value):
    """Overwrite every stored value, digest included, as somebody with access to the folder could."""
    files = list(folder.iterdir())
    for file in files:
        text = json.loads(file.read_text())["of"]
        cache._write(file, text, value)
    return len(files)


def test_no_planted_file_lowers_a_printed_epsilon(cache_folder):
    charges = [acc.Charge(acc.SampledStep(acc.GaussianRelease(1.1), 0.01), 2000)]
    true = acc.epsilon(charges, 1e-5)
    assert plant(cache_folder, 0.01) == 1
    assert acc.epsilon(charges, 1e-5) == 0.01  # a search may be misled
    assert acc.epsilon(charges, 1e-5, fresh=True) == true
    spent = acc.privacy_spent(charges, 1e-5)
    assert spent.epsilon == true
    assert acc.planned_epsilon(charges, charges[0].step, 2000, 1e-5) == true
    acc.plan(epsilon=2.0, batch_size=100, epochs=5, dataset_size=10_000)
    assert plant(cache_folder, 0.5) > 1
    with pytest.raises(BudgetError, match=r"noise_multiplier=0\.5"):  # the search is misled; what it found is priced, and refused
        acc.plan(epsilon=2.0, batch_size=100, epochs=5, dataset_size=10_000)


def test_a_fresh_epsilon_is_computed_once_per_process(cache_folder, monkeypatch):
    charges = [acc.Charge(acc.SampledStep(acc.GaussianRelease(1.7), 0.01), 77)]
    first = acc.privacy_spent(charges, 1e-5).epsilon
    assert not list(cache_folder.iterdir())
    monkeypatch.setattr(privacy_cost, "curves", lambda *_: pytest.fail("computed again"))
    assert acc.privacy_spent(charges, 1e-5).epsilon == first


def test_results_of_other_sources_are_not_found(cache_folder, monkeypatch):
    assert cache.remember("epsilon", {"a": 1}, lambda: 2.5) == 2.5
    monkeypatch.setattr(cache, "sources", lambda: "those of another version")
    assert cache.remember("epsilon", {"a": 1}, lambda: 3.5) == 3.5


def test_every_source_of_a_number_is_in_the_key(tmp_path, monkeypatch):
    """A change of one byte in any of the files, or a new file, changes the hash."""
    package = tmp_path / "dpulr"
    shutil.copytree(Path(cache.__file__).parent.parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "__file__", str(package / "accounting" / "cache.py"))
    found = {cache.sources.__wrapped__()}
    assert found == {cache.sources()}
    changed = [*package.glob("accounting/*.py"), package / "paper" / "nominal.py", package / "search.py"]
    assert len(changed) > 20
    for file in changed:
        file.write_bytes(file.read_bytes() + b" ")
        found.add(cache.sources.__wrapped__())
    (package / "accounting" / "new.py").write_text("")
    found.add(cache.sources.__wrapped__())
    assert len(found) == len(changed) + 2
