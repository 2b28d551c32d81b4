"""What can go wrong, by kind. Each kind is also a ValueError or a RuntimeError, as callers expect; advice is a warning.

The command line turns kinds into exit codes; nothing is told apart by the text of a message.
"""

from __future__ import annotations


class InvalidArgument(ValueError):
    """An argument makes no sense. The message names it, says what was given and what was expected."""


class DataError(ValueError):
    """A data set can't be found, read or used."""


class ModelRefused(ValueError):
    """A model or a loss function that can't be trained with a guarantee. The message names the layer."""


class BlackBoxError(RuntimeError):
    """A black box raised, is down, or returned something else than it should. The message names it."""


class BlackBoxTimeout(BlackBoxError, TimeoutError):
    """A black box has not answered in time."""


class BudgetError(ValueError):
    """No noise, or not a single step, meets the privacy budget."""


class StepError(RuntimeError):
    """Batches and steps were used in another way than the guarantee assumes."""


class RunError(RuntimeError):
    """A run failed for a reason that is neither wrong usage nor a matter of privacy: a full disk, a damaged file."""


class UsageError(RunError, ValueError):
    """What was asked for makes no sense; nothing was done."""


class PrivacyRefusal(RunError):
    """What was asked for would break, or could hide, what the guarantee says; nothing was done."""


class Interrupted(RunError):
    """Ctrl-C or SIGTERM; what was trained so far is saved."""


class RankLost(RunError):
    """A process of a run on several died, hangs or does something else. The message names it."""


ENDING = (KeyboardInterrupt, SystemExit, GeneratorExit, Interrupted)
"""What ends the program, or is meant to: it passes through whatever is done with a single record."""


class _Forgiven:
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, problem: object, trace: object) -> bool:
        return kind is not None and not issubclass(kind, ENDING)


forgiven = _Forgiven()
"""`with forgiven:` whatever a user's code raises for a record is forgotten: panics of Rust, too, which are no `Exception`."""


class Advice(UserWarning):
    """Not an error: a sentence about the model and the mechanism, said once per process. Filter this category to silence it."""
