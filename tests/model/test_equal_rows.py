"""Random numbers that are the same for every record: whatever draws them, and wherever the record stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpulr.errors import ModelRefused
from dpulr.model.equal_rows import EqualRows

torch.manual_seed(0)
ATTENTION = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
RECURRENT = nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True)
POSITIONS = 6

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "dropout of channels": lambda x: F.dropout1d(x, 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rand": lambda x: x + torch.rand(x.shape),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn_like of a view": lambda x: x + torch.randn_like(x.transpose(1, 2)).transpose(1, 2),
    "randint": lambda x: x + torch.randint(0, 100, x.shape),
    "filled": lambda x: x + torch.empty_like(x).normal_(),
    "filled, half of it": lambda x: (
        x + torch.zeros_like(x).index_copy(1, torch.tensor([0]), torch.empty(len(x), 1, 4).exponential_())
    ),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of its own chances": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "normal": lambda x: torch.normal(x, x.abs()),
    "poisson": lambda x: torch.poisson(5 * x.abs()),
    "multinomial": lambda x: torch.multinomial(x.flatten(1).sigmoid(), 3),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "attention in heads": lambda x: ATTENTION(x, x, x)[0],
    "recurrent": lambda x: RECURRENT(x)[0],
    "positions first": lambda x: F.dropout(x.transpose(0, 1), 0.5).transpose(0, 1),
    "positions and records in one axis": lambda x: F.dropout(x.reshape(-1, 4), 0.5).view(x.shape),
    "one number for all": lambda x: x * torch.rand(()),
}


def drawn(draw: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.inference_mode(), torch.random.fork_rng(), EqualRows(len(x)):
        return draw(x).clone()


@pytest.mark.parametrize("name", DRAWS)
def test_a_record_draws_the_same_at_every_place_and_size(name: str) -> None:
    draw = DRAWS[name]
    x = torch.randn(5, POSITIONS, 4, generator=torch.Generator().manual_seed(1))
    first = drawn(draw, x)
    torch.testing.assert_close(drawn(draw, x[[3, 1]]), first[[3, 1]])
    torch.testing.assert_close(drawn(draw, x.repeat(7, 1, 1)), first.repeat(7, *[1] * (first.dim() - 1)))
    with torch.inference_mode():
        assert name in ("recurrent", "positions and records in one axis") or not torch.equal(draw(x), draw(x)), "nothing was drawn"


def test_a_record_draws_again_in_each_call() -> None:
    with torch.inference_mode(), torch.random.fork_rng(), EqualRows(5):
        first, second = torch.randn(5, 3), torch.randn(5, 3)
    assert torch.equal(first[0], first[4])
    assert not torch.equal(first, second)


def test_rows_differ_where_there_is_one_record() -> None:
    """It has all random numbers to itself."""
    assert len(drawn(lambda x: torch.rand(30), torch.zeros(1, 1)).unique()) == 30


# --- numbers that everybody knows -----------------------------------------------------------------------------------------
def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return torch.rand_like(x)


def seeded_apart(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.rand_like(x)


@pytest.mark.parametrize("draw", [seeded, seeded_apart])
def test_a_seed_of_the_model_is_refused(draw: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ModelRefused, match="sets the seed of torch's generator"):
        drawn(draw, torch.zeros(5, 2))


def test_a_generator_of_the_model_is_refused() -> None:
    own = torch.Generator().manual_seed(0)
    with pytest.raises(ModelRefused, match=r"random numbers from a .* of its own"):
        drawn(lambda x: torch.rand(x.shape, generator=own), torch.zeros(5, 2))
    drawn(lambda x: torch.rand(x.shape, generator=torch.default_generator), torch.zeros(5, 2))
