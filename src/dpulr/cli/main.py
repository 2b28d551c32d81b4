"""The entry point: runs a command and turns every failure into a sentence and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence

from dpulr.runs.errors import Interrupted, RunError

_SPACE = "the disk is full. What was recorded is kept; make room and go on (a run with 'dpulr resume')."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `dpulr` with these arguments; return the exit code: 0 done, 1 failed, 2 usage, 3 refused for privacy, 4 claim refuted,
    130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given or os.environ.get("DPULR_DEBUG", "") not in ("", "0")
    given = [argument for argument in given if argument != "--debug"]
    try:
        return _run(given)
    except BaseException as problem:
        if isinstance(problem, SystemExit):
            return problem.code if isinstance(problem.code, int) else 1
        if debug:
            traceback.print_exc()
        code, text = _explained(problem)
        _complain(text)
        return code


def _run(given: list[str]) -> int:
    import typer
    from typer.main import get_command

    from dpulr.cli.app import app

    command = get_command(app)
    try:
        code = command.main(args=given, prog_name="dpulr", standalone_mode=False)
    except typer.Abort:
        raise Interrupted("interrupted.") from None
    except Exception as problem:
        show = getattr(problem, "show", None)  # usage errors of the parser print themselves, with the command's usage line
        if show is None or not hasattr(problem, "exit_code"):
            raise
        show()
        return int(problem.exit_code)
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _explained(problem: BaseException) -> tuple[int, str]:
    if isinstance(problem, RunError):
        return problem.code, str(problem)
    if isinstance(problem, KeyboardInterrupt):
        return Interrupted.code, "interrupted."
    if isinstance(problem, BrokenPipeError):
        _close_output()
        return 1, ""
    if isinstance(problem, OSError):
        if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return 1, _SPACE
        place = f" ({problem.filename})" if problem.filename else ""
        return 1, f"{problem.strerror or problem}{place}."
    if isinstance(problem, ValueError | OverflowError):
        return 2, str(problem) or "a value is out of range."
    if isinstance(problem, MemoryError):
        return 1, "there is not enough memory."
    return 1, f"{type(problem).__name__}: {problem}. With --debug you see where it comes from."


def _complain(text: str) -> None:
    if text:
        # surrogates come from file names that are not valid text
        print(f"dpulr: {text}".encode("utf-8", "replace").decode(), file=sys.stderr)


def _close_output() -> None:
    """Whoever read our output is gone; keep Python from complaining about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def entry() -> None:
    sys.exit(main())
