"""The cache on disk: it keeps what was slow, and ignores what is damaged."""

import math
import os
from dataclasses import dataclass

import pytest

from dpulr import accounting as acc
from dpulr.accounting import cache


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
