"""Bags of embeddings: the rule against autograd, record by record, and a million rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import dpulr
from dpulr.model.layers import Call, rule_for
from dpulr.model.layers.base import LayerRule
from dpulr.model.layers.embedding import EmbeddingBagRule
from tests.support.core import engine, train


def made(mode: str, padding: int | None) -> tuple[nn.EmbeddingBag, Tensor, Call, Any]:
    torch.manual_seed(0)
    layer = nn.EmbeddingBag(6, 4, mode=mode, padding_idx=padding).double()
    tokens = torch.randint(0, 6, (5, 7))
    tokens[0] = 2 if padding is None else padding  # all alike, or nothing but padding
    with torch.inference_mode():
        call = Call((tokens,), {}, layer(tokens))
    return layer, tokens, call, rule_for(layer, dict(layer.named_parameters()), call)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 3])
def test_the_rule_is_what_autograd_finds(mode: str, padding: int | None) -> None:
    layer, tokens, call, rule = made(mode, padding)
    assert isinstance(rule, EmbeddingBagRule)
    signal = torch.randn(5, 4, dtype=torch.float64)
    wanted = torch.stack(
        [torch.autograd.grad((layer(row.unsqueeze(0)) * u).sum(), layer.weight)[0] for row, u in zip(tokens, signal, strict=True)]
    )
    with torch.inference_mode():
        found = torch.zeros_like(layer.weight)
        rule.add_gradient(call, signal, {"weight": found})
        torch.testing.assert_close(found, wanted.sum(0))
        torch.testing.assert_close(rule.norms(call, signal), wanted.flatten(1).norm(dim=1))
        assert (rule.gains(call) * signal.norm(dim=1) >= wanted.flatten(1).norm(dim=1) * (1 - 1e-12)).all()
        delta = torch.randn(2, 5, 6, 4, dtype=torch.float64)
        if padding is not None:
            delta[:, :, padding] = 0
        moved = rule.with_weights(call, delta.flatten(2))
        for r in range(2):
            for i in range(5):
                own = functional_call(layer, {"weight": layer.weight + delta[r, i]}, (tokens[i : i + 1],))
                torch.testing.assert_close(moved[r, i], own[0])


def test_what_the_rule_does_not_know_is_moved_in_its_weights() -> None:
    assert type(made("max", None)[3]) is LayerRule
    layer = nn.EmbeddingBag(6, 4, mode="sum")
    call = Call((torch.zeros(3, 2, dtype=torch.int64), None, torch.ones(3, 2)), {}, torch.zeros(3, 4))
    assert type(rule_for(layer, dict(layer.named_parameters()), call)) is LayerRule


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["hidden-direction", "gradient"])
def test_a_million_rows_are_no_million_per_record(mechanism: str) -> None:
    model = nn.Sequential(nn.EmbeddingBag(1_000_000, 4), nn.Linear(4, 3))
    data = torch.utils.data.TensorDataset(torch.randint(0, 1_000_000, (300, 5)), torch.randint(0, 3, (300,)))
    private = engine(model, data, mechanism=mechanism, steps=1)
    assert [site.space for site in private.forward.sites] == ["output", "output"]
    assert private.forward.bytes_per_record < 100_000
    assert train(private) == 1
    assert private.guarantee == "certified"
    assert isinstance(private, dpulr.PrivacyEngine)
