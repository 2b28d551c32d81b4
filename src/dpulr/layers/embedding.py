"""`nn.Embedding`: a signal at the output is added to the rows of the record's tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpulr.layers.base import Call, Deltas, WeightLinearRule


class EmbeddingRule(WeightLinearRule):
    """Two positions with the same token share a row, so norms and gains count how often a token comes."""

    module: nn.Embedding

    def _tokens(self, call: Call) -> Tensor:
        return call.input.reshape(call.records, -1)

    def _same(self, call: Call) -> Tensor:
        """(records, positions, positions): 1 where two positions share a trained row."""
        tokens = self._tokens(call)
        same = tokens.unsqueeze(1) == tokens.unsqueeze(2)
        if self.module.padding_idx is not None:
            same = same & (tokens != self.module.padding_idx).unsqueeze(1)
        return same.to(call.output.dtype)

    def _rows(self, call: Call, signal: Tensor) -> Tensor:
        return signal.reshape(call.records, self._tokens(call).shape[1], self.module.embedding_dim)

    def norms(self, call: Call, signal: Tensor) -> Tensor:
        u = self._rows(call, signal)
        return ((u @ u.transpose(1, 2)) * self._same(call)).sum((1, 2)).clamp_min(0).sqrt()

    def gains(self, call: Call) -> Tensor:
        return self._same(call).sum(2).amax(1).sqrt()

    def add_gradient(self, call: Call, signal: Tensor, into: dict[str, Tensor]) -> None:
        u = self._rows(call, signal).flatten(0, 1)
        tokens = self._tokens(call).flatten()
        if self.module.padding_idx is not None:
            u = u * (tokens != self.module.padding_idx).unsqueeze(1)
        into["weight"].index_add_(0, tokens, u)

    def shift(self, call: Call, deltas: Deltas) -> Tensor:
        weight, tokens = deltas["weight"], self._tokens(call)
        repeats, records = weight.shape[:2]
        index = tokens.view(1, records, -1, 1).expand(repeats, records, -1, weight.shape[-1])
        rows = torch.gather(weight, 2, index)
        if self.module.padding_idx is not None:
            rows = rows * (tokens != self.module.padding_idx).view(1, records, -1, 1)
        return rows.view(repeats, records, *call.output.shape[1:])
