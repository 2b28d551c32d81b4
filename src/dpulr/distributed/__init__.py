"""One run on several processes: torch.distributed moves the sums, this package says who adds what (docs/scale.md)."""

from __future__ import annotations

from dpulr.distributed.ranks import MOST_RANKS, Alone, Ranks, join

__all__ = ["MOST_RANKS", "Alone", "Ranks", "join"]
