"""`nn.Embedding` and `nn.EmbeddingBag`: a signal at the output is added to the rows of the record's tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpulr.model.layers.base import Call, WeightDeltas, WeightLinearRule, not_cancelled, numel
from dpulr.norms import flat_norm


class EmbeddingRule(WeightLinearRule):
    """Two positions with the same token share a row, so norms and gains count how often a token comes."""

    handles = frozenset({"weight"})
    finite_gain_suffices = True  # tokens are whole numbers
    module: nn.Embedding

    def _tokens(self, call: Call) -> Tensor:
        return call.input.reshape(call.records, numel(call.input.shape[1:]))

    def _same(self, call: Call) -> Tensor:
        """(records, positions, positions): True where two positions share a trained row."""
        tokens = self._tokens(call)
        same = tokens.unsqueeze(1) == tokens.unsqueeze(2)
        if self.module.padding_idx is not None:
            same = same & (tokens != self.module.padding_idx).unsqueeze(1)
        return same

    def _rows(self, call: Call, signal: Tensor) -> Tensor:
        return signal.reshape(call.records, self._tokens(call).shape[1], self.module.embedding_dim)

    def norms(self, call: Call, signal: Tensor) -> Tensor:
        """Positions are added up where their token comes first: no squares that cancel."""
        u, same = self._rows(call, signal).double(), self._same(call)
        first = same & (same.cumsum(2) == 1)
        norm = not_cancelled(flat_norm(first.to(u.dtype).transpose(1, 2) @ u), flat_norm(u * same.any(1).unsqueeze(2)))
        return norm.to(signal.dtype)

    def gains(self, call: Call) -> Tensor:
        return self._same(call).sum(2).amax(1).to(call.output.dtype).sqrt()

    def sums_positions(self, call: Call) -> bool:
        return self._tokens(call).shape[1] > 1

    def add_gradient(self, call: Call, signal: Tensor, into: dict[str, Tensor]) -> None:
        u = self._rows(call, signal).flatten(0, 1)
        tokens = self._tokens(call).flatten()
        if self.module.padding_idx is not None:
            u = u * (tokens != self.module.padding_idx).unsqueeze(1)
        into["weight"].index_add_(0, tokens, u)

    def leave_untrained(self, gradients: dict[str, Tensor]) -> None:
        if self.module.padding_idx is not None:
            gradients["weight"][self.module.padding_idx] = 0

    def shift(self, call: Call, deltas: WeightDeltas) -> Tensor:
        weight, tokens = deltas["weight"], self._tokens(call)
        repeats, records = weight.shape[:2]
        index = tokens.view(1, *tokens.shape, 1).expand(repeats, *tokens.shape, weight.shape[-1])
        rows = torch.gather(weight, 2, index)
        if self.module.padding_idx is not None:
            rows = rows * (tokens != self.module.padding_idx).view(1, *tokens.shape, 1)
        return rows.view(repeats, records, *call.output.shape[1:])


class EmbeddingBagRule(EmbeddingRule):
    """`nn.EmbeddingBag` of tokens (records, positions), by sum or mean: the signal is added to the rows of all tokens alike."""

    module: nn.EmbeddingBag  # type: ignore[assignment]

    @staticmethod
    def knows(module: nn.Module, call: Call | None) -> bool:
        """Not the maximum, no offsets, no weights per token: these are moved in their weights, as any module is."""
        plain = call is None or (len(call.args) == 1 and not call.kwargs and call.input.dim() == 2)
        return plain and getattr(module, "mode", None) in ("sum", "mean")

    def _share(self, call: Call) -> Tensor:
        """What a token of the record has in its output."""
        if self.module.mode == "sum":
            return call.output.new_ones(call.records)
        tokens = self._same(call).diagonal(dim1=1, dim2=2).sum(1).to(call.output.dtype)  # padding left out
        return torch.where(tokens > 0, 1 / tokens.clamp_min(1), 0)

    def gains(self, call: Call) -> Tensor:
        return self._share(call) * self._same(call).sum((1, 2)).to(call.output.dtype).sqrt()

    def norms(self, call: Call, signal: Tensor) -> Tensor:
        return flat_norm(signal) * self.gains(call)

    def add_gradient(self, call: Call, signal: Tensor, into: dict[str, Tensor]) -> None:
        own = (signal * self._share(call).unsqueeze(1)).unsqueeze(1).expand(-1, self._tokens(call).shape[1], -1)
        super().add_gradient(call, own, into)

    def shift(self, call: Call, deltas: WeightDeltas) -> Tensor:
        weight, tokens = deltas["weight"], self._tokens(call)
        index = tokens.view(1, *tokens.shape, 1).expand(len(weight), *tokens.shape, weight.shape[-1])
        rows = torch.gather(weight, 2, index)
        if self.module.padding_idx is not None:
            rows = rows * (tokens != self.module.padding_idx).view(1, *tokens.shape, 1)
        return rows.sum(2) * self._share(call).view(1, -1, 1)
