"""Refusals that a person can act on, with the exit code that tells a script which kind it is."""

from __future__ import annotations


class RunError(Exception):
    """Something went wrong that is neither wrong usage nor a matter of privacy: a full disk, a damaged file of results."""

    code = 1


class UsageError(RunError):
    """What was asked for makes no sense; nothing was done."""

    code = 2


class PrivacyRefusal(RunError):
    """What was asked for would break, or could hide, what the guarantee says; nothing was done."""

    code = 3


class Interrupted(RunError):
    """Ctrl-C or SIGTERM; what was trained so far is saved."""

    code = 130
