"""The command line, `dpulr`. Nothing heavy is imported before a command needs it, so that help comes at once."""

from __future__ import annotations

from dpulr.cli.main import main

__all__ = ["main"]
