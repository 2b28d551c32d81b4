"""Losses that count errors, one number per record."""

from __future__ import annotations

import itertools

import pytest
import torch

from dpulr import losses


def scores(tokens: list[int], kinds: int = 3) -> torch.Tensor:
    """Scores whose highest is at each of these."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), kinds).double()


def steps_between(a: list[int], b: list[int]) -> int:
    """Insertions, deletions and replacements, by trying all of them."""
    if not a or not b:
        return len(a) + len(b)
    if a[0] == b[0]:
        return steps_between(a[1:], b[1:])
    return 1 + min(steps_between(a[1:], b), steps_between(a, b[1:]), steps_between(a[1:], b[1:]))


def test_the_distance_of_two_texts_is_the_fewest_steps_between_them() -> None:
    pairs = list(itertools.product(itertools.product(range(3), repeat=3), itertools.product(range(3), repeat=2)))
    found = losses.edit_distance(torch.stack([scores(list(a)) for a, _ in pairs]), torch.tensor([list(b) for _, b in pairs]))
    assert found.tolist() == [steps_between(list(a), list(b)) for a, b in pairs]


@pytest.mark.parametrize(("k", "wrong"), [(1, [0, 1, 1]), (2, [0, 0, 1]), (3, [0, 0, 0])])
def test_a_label_among_the_best_is_right(k: int, wrong: list[int]) -> None:
    output = torch.tensor([[3.0, 2.0, 1.0]] * 3)
    assert losses.top_k(k)(output, torch.tensor([0, 1, 2])).tolist() == wrong
    assert losses.zero_one(output, torch.tensor([0, 1, 2])).tolist() == [0, 1, 1]


def test_one_wrong_token_is_an_error() -> None:
    output = torch.stack([scores([0, 1]), scores([0, 2])])
    assert losses.exact_match(output, torch.tensor([[0, 1], [0, 1]])).tolist() == [0, 1]
