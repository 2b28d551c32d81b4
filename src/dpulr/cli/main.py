"""The entry point: runs a command and turns every failure into a sentence and an exit code. Exit codes stand here alone."""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpulr import errors
from dpulr.distributed.launch import rank

FAILED, USAGE, REFUSED, CLAIM_REFUTED, INTERRUPTED = 1, 2, 3, 4, 130
CODES: dict[type[BaseException], int] = {  # the first that fits
    errors.Interrupted: INTERRUPTED,
    KeyboardInterrupt: INTERRUPTED,
    errors.PrivacyRefusal: REFUSED,
    errors.BudgetError: REFUSED,
    errors.UsageError: USAGE,
    errors.InvalidArgument: USAGE,
    errors.DataError: USAGE,
    errors.ModelRefused: USAGE,
    errors.RunError: FAILED,
}
_SPACE = "the disk is full. What was recorded is kept; make room and go on (a run with 'dpulr resume')."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `dpulr` with these arguments; return the exit code: 0 done, 1 failed, 2 usage, 3 refused for privacy, 4 claim refuted,
    130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given or os.environ.get("DPULR_DEBUG", "") not in ("", "0")
    given = [argument for argument in given if argument != "--debug"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            return _run(given)
    except BaseException as problem:
        if isinstance(problem, SystemExit):
            return problem.code if isinstance(problem.code, int) else FAILED
        if debug:
            traceback.print_exc()
        code, text = _explained(problem)
        if rank() == 0 or code != INTERRUPTED:
            _complain(f"rank {rank()}: {text}" if rank() else text)
        return code


def _run(given: list[str]) -> int:
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as problem:
        raise errors.UsageError("the command line needs typer and rich: pip install 'dpulr[cli]'.") from problem
    from typer.main import get_command

    from dpulr.cli.app import app

    command = get_command(app)
    try:
        code = command.main(args=given, prog_name="dpulr", standalone_mode=False)
    except typer.Abort:
        raise errors.Interrupted("interrupted.") from None
    except Exception as problem:
        show = getattr(problem, "show", None)  # usage errors of the parser print themselves, with the command's usage line
        if show is None or not hasattr(problem, "exit_code"):
            raise
        show()
        return int(problem.exit_code)
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _explained(problem: BaseException) -> tuple[int, str]:
    for kind, code in CODES.items():
        if isinstance(problem, kind):
            return code, str(problem) or "interrupted."
    if isinstance(problem, BrokenPipeError):
        _close_output()
        return FAILED, ""
    if isinstance(problem, OSError):
        if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return FAILED, _SPACE
        place = f" ({problem.filename})" if problem.filename else ""
        return FAILED, f"{problem.strerror or problem}{place}."
    if isinstance(problem, MemoryError):
        return FAILED, "there is not enough memory."
    return FAILED, f"internal error: {type(problem).__name__}: {problem}. With --debug you see where it comes from."


def _complain(text: str) -> None:
    if text:
        # surrogates come from file names that are not valid text
        print(f"dpulr: {text}".encode("utf-8", "replace").decode(), file=sys.stderr)


_show = warnings.showwarning


def _warn(message: Warning | str, category: type[Warning], filename: str, *where: Any, **more: Any) -> None:
    """What the library warns of is a sentence, too; whose line it came from is of no use here."""
    if Path(filename).is_relative_to(Path(errors.__file__).parent):
        _complain(str(message))
    else:
        _show(message, category, filename, *where, **more)


def _close_output() -> None:
    """Whoever read our output is gone; keep Python from complaining about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def entry() -> None:
    sys.exit(main())
