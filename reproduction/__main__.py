"""`python -m reproduction STUDY`: run what the documentation quotes, or print it from the results."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import reproduction
from reproduction import hours, studies
from reproduction.results_file import FOLDER_VARIABLE


def parser() -> argparse.ArgumentParser:
    names = [*studies.studies(), *studies.OTHERS]
    parser = argparse.ArgumentParser(
        prog="python -m reproduction",
        description="Runs that have a result are not made again, so a stopped command goes on where it was.",
        epilog="--list says what each study is, and about how long it takes.",
    )
    parser.add_argument("study", nargs="?", choices=names, metavar="STUDY", help=", ".join(names))
    parser.add_argument("--list", action="store_true", help="print the studies with an estimate of their hours")
    parser.add_argument("--show", action="store_true", help="run nothing: print what the results hold")
    parser.add_argument("--check", action="store_true", help="pages: change nothing, fail where a page differs from the results")
    parser.add_argument("--settings", nargs="+", help="only these, such as 500:4; 500 means all that begin with it")
    parser.add_argument("--seeds", type=_positive, default=1, help="seeds 0, 1, ... of each setting")
    parser.add_argument("--epochs", type=_positive, help="epochs of each run")
    parser.add_argument("--jobs", type=_positive, help="runs side by side, one thread each; by default one per core")
    change = parser.add_argument_group("changes to the paper's runs, where the paper leaves something open")
    change.add_argument("--repeats", type=_positive, help="K")
    change.add_argument("--sigma", type=float, help="standard deviation of the injected noise")
    change.add_argument("--holdout", type=int, help="test on the last so many training records, train on the others")
    change.add_argument("--dataset", help="such as mnist, for inputs of mean 0 and variance 1 instead of pixels in [0, 1]")
    change.add_argument("--model", help="such as reproduction.models:torch_start, for torch's initial weights")
    parser.add_argument("--results", type=Path, default=None, help="another folder of results")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


CHANGES = ("repeats", "sigma", "holdout", "dataset", "model")


def main(arguments: list[str] | None = None) -> int:
    parse = parser()
    given = parse.parse_args(arguments)
    if given.results is not None:
        os.environ[FOLDER_VARIABLE] = str(given.results)
    if given.list or given.study is None:
        print(hours.listing(given.seeds))
        return 0
    if given.study in studies.OTHERS:
        return _other(given)
    study = studies.studies()[given.study]
    try:
        choice = studies.chosen(study, given.settings) if given.settings else study.choice()
    except ValueError as problem:
        parse.error(str(problem))
    changes = {name: getattr(given, name) for name in CHANGES if getattr(given, name) is not None}
    if changes and not study.changeable:
        parse.error(f"{study.name} is run as it is: --{next(iter(changes))} is for the paper's runs.")
    choice = replace(choice, seeds=given.seeds, epochs=given.epochs or study.epochs, changes=changes)
    if not given.show:
        from reproduction.many_runs import run_all

        if study.before is not None:
            study.before(choice.seeds)
        for stage in study.stages(choice):
            run_all(stage, jobs=given.jobs)
    print(study.show(choice))
    return 0


def _other(given: Any) -> int:
    """The commands that are no list of runs."""
    if given.study == "errata":
        from reproduction import errata

        print(errata.text())
    elif given.study == "epsilons":
        from reproduction import paper_epsilons

        print(paper_epsilons.markdown())
    elif given.study == "bugs":
        from reproduction.planted_bugs import BUGS

        for bug in BUGS.values():
            print(f"{bug.what}: {bug.audit(seed=5)}", flush=True)
    elif given.study == "audit":
        from reproduction import audit_sweep

        if not given.show:
            audit_sweep.run(lambda line: print(line, file=sys.stderr, flush=True))
        print("\n\n".join(audit_sweep.parts().values()))
    else:
        return _documents(given)
    return 0


def _documents(given: Any) -> int:
    from reproduction import documents

    if given.study == "figure-bound":
        documents.draw_bound()
        return 0
    if given.check:
        wrong = documents.check()
        print("\n".join(wrong) or f"All pages of {reproduction.DOCS} say what the results say.")
        return 1 if wrong else 0
    changed = documents.write()
    documents.draw()
    print(f"Changed: {', '.join(changed) or 'nothing'}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
