"""Measured lower bounds on epsilon, with stated confidence: what a claim is worth (docs/audit.md)."""

from __future__ import annotations

from dpulr.audit.claims import Claim
from dpulr.audit.games import BatchGame, Game, RowsGame
from dpulr.audit.one_step import one_step, play
from dpulr.audit.picture import draw
from dpulr.audit.verdict import Verdict
from dpulr.audit.whole_run import many_runs, one_run

__all__ = ["BatchGame", "Claim", "Game", "RowsGame", "Verdict", "draw", "many_runs", "one_run", "one_step", "play"]
