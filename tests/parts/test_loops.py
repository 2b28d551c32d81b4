"""How many batches are left, and epochs."""

from __future__ import annotations

import pytest

from tests.test_private_scores import trained


def test_len_counts_what_is_left() -> None:
    engine = trained(take=0)
    batches = engine.batches()
    assert len(batches) == 4
    x, y = next(batches)
    assert len(batches) == 4  # not yet taken
    engine.step(x, y)
    assert len(batches) == 3
    assert len(engine.batches(2)) == 2


@pytest.mark.parametrize(("size", "taken", "sizes"), [(4, 0, [4]), (3, 0, [3, 1]), (3, 1, [2, 1]), (2, 2, [2])])
def test_epochs_cover_the_rest_of_the_run(size: int, taken: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained(take=taken)
    monkeypatch.setattr(type(engine), "steps_per_epoch", property(lambda self: size))
    assert len(engine.epochs()) == len(sizes)
    found = []
    for epoch in engine.epochs():
        found.append(len(epoch))
        for x, y in epoch:
            engine.step(x, y)
    assert found == sizes


def test_an_epoch_is_the_rate_turned_round() -> None:
    assert trained(take=0).steps_per_epoch == 4  # 200 records, batches of 50


def test_a_loop_that_finds_nothing_left_is_told() -> None:
    engine = trained(take=4)
    with pytest.warns(UserWarning, match=r"all 4 planned steps are taken.*engine.epochs"):
        assert list(engine.batches()) == []
