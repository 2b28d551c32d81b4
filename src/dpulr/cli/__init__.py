"""The command line, `dpulr`: one file per command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

from dpulr.cli.main import main

__all__ = ["main"]
