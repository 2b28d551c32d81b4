"""One record changes nothing but its own contribution: every step is recorded, and replayed with one record more.

The pairs are made from fixed seeds. Whoever finds a failing one gets it back by the name of its model and its number.
"""

from __future__ import annotations

import pytest

from tests.privacy.cases import MODELS, Pairs
from tests.support.replaying import Leak, compare

QUICK, SLOW = 12, 440


def replayed(name: str, numbers: range, capfd: pytest.CaptureFixture[str]) -> int:
    pairs, done, largest = Pairs(name), 0, 0.0
    for number in numbers:
        replay, data, neighbour, seed, what = pairs.draw(number)
        try:
            shares = compare(replay, data, neighbour, seed, without=["warnings"] if MODELS[name].warns else [])
        except Leak as leak:
            raise Leak(f"{what}: {leak}") from None
        done += 1
        largest = max(largest, *shares.values())
    assert largest > 0.9  # some record does reach its bound: the comparison is not empty
    assert capfd.readouterr() == ("", "")
    return done


@pytest.mark.parametrize("name", MODELS)
def test_one_record_changes_only_its_own_share(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert replayed(name, range(QUICK), capfd) == QUICK


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_one_record_changes_only_its_own_share_in_thousands_of_pairs(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert replayed(name, range(QUICK, QUICK + SLOW), capfd) == SLOW


def test_these_are_as_many_pairs_as_promised() -> None:
    assert len(MODELS) * QUICK >= 300
    assert len(MODELS) * SLOW >= 10_000
