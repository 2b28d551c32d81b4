"""Every command of README and docs is run, in a folder of its own, one after the other as a reader would type them.

What a page takes as given is made first. Commands that would take long get fewer steps or trials (`ADDED`); what can't run here is
in `ELSEWHERE`, with the reason.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

from dpulr import cli
from dpulr.cli.app import app
from dpulr.data import catalog, cifar
from reproduction import RESULTS, documents
from reproduction.__main__ import main as reproduction
from reproduction.results_file import FOLDER_VARIABLE
from tests.support.small_cli import child_environment
from tests.test_docs import DEEPER, PAGES, PROGRAMS, ROOT, blocks
from tests.test_docs import workplace as workplace

PROGRAM_NAMES = ("dpulr", "make", "pip", "python", "torchrun", "npm")


def lines_of(page: Path) -> list[str]:
    """The commands of a page: in ```sh blocks, those that are indented, and those after a $."""
    text = page.read_text()
    plain = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    names = "|".join(PROGRAM_NAMES)
    indented = re.findall(rf"^ {{4,}}(?:\$ )?((?:{names}) .*(?:(?<=\\)\n.*)*)", plain, re.MULTILINE)
    indented += re.findall(rf"^\$ ((?:{names}) .*)", text, re.MULTILINE)
    listed = "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [*(line for line in listed if line.strip()), *(line.replace("\\\n", " ") for line in indented)]


COMMANDS = {page.name: [shlex.split(line, comments=True) for line in lines_of(page)] for page in [*PAGES, *DEEPER]}
OWN = [(page, words[1:]) for page, commands in COMMANDS.items() for words in commands if words[0] == "dpulr"]

ELSEWHERE = {  # how a command begins, and why it is not run here
    "make": "sets up an environment of its own, or takes hours; below, make says what it would do",
    "pip install": "needs an index of packages that has this one; tests/test_wheel.py installs the wheel",
    "npm pack": "a download",
    "python -m reproduction pages": "changes the pages; tests/reproduction/test_pages.py compares them",
    "python -m benchmarks.kept_step": "minutes; tests/test_kept.py takes such steps",
    "python -m benchmarks.transformers": "minutes; tests/model/test_exported.py runs the same models",
    "python examples/": "tests/examples runs them all",
}
ADDED = {  # what makes a command short; the rest of it stays as printed
    "dpulr train": "--steps 2",
    "dpulr train --model hf:": "--steps 2 --batch-size 20 --tokens 8",
    "dpulr resume RUN --epsilon 3": "--steps 20",
    "dpulr tune --space": "--steps 2 --runs 1.5",
    "dpulr audit": "--trials 300",
    "dpulr audit --mechanism paper": "",
    "dpulr audit --game randomness": "",
    "torchrun --nproc-per-node 2 -m dpulr train": "--steps 2",
    "python -m reproduction ": "--show",  # hours, unless there are results
    "python -m reproduction errata": "",
    "python -m benchmarks.text_memory": "inference 2 8",
}
CODES = {"dpulr audit --mechanism paper": 4}


def of(table: dict[str, str], words: list[str]) -> str | None:
    """The entry for the longest beginning of a command."""
    line = " ".join(words)
    return table.get(max((begin for begin in table if line.startswith(begin)), key=len, default=""))


def is_quick(arguments: list[str]) -> bool:
    return arguments[0] == "train" or "--dims" in arguments or arguments[:2] in (["data", "schema"], ["data", "list"])


@pytest.mark.parametrize(("page", "arguments"), OWN, ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_commands_are_understood(page: str, arguments: list[str]) -> None:
    """All options of every command exist and have values that fit."""
    command, name, rest = get_command(app), "dpulr", arguments
    while hasattr(command, "commands"):
        name, *rest = rest
        command = command.commands[name]
    command.make_context(name, rest)


@pytest.mark.parametrize(("page", "arguments"), [(page, words) for page, words in OWN if is_quick(words)])
def test_quick_commands_do_what_they_say(page: str, arguments: list[str], workplace: Path) -> None:
    """As printed; but what trains says only what it would do."""
    assert cli.main([*arguments, *(["--dry-run"] if arguments[0] == "train" else [])]) == 0


def test_make_knows_its_targets() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not on this machine")
    targets = {words[1] for commands in COMMANDS.values() for words in commands if words[0] == "make"}
    assert len(targets) >= 4
    subprocess.run(["make", "--dry-run", *sorted(targets)], cwd=ROOT, capture_output=True, check=True)


def test_what_runs_elsewhere_is_there() -> None:
    """Modules, examples, and extras of the package."""
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for words in (words for commands in COMMANDS.values() for words in commands):
        if words[:2] == ["python", "-m"] and "." in words[2]:
            assert (ROOT / f"{words[2].replace('.', '/')}.py").exists(), words
        elif words[0] == "python" and words[1] != "-m":
            assert (ROOT / words[1]).exists(), words
        for group in re.findall(r"\[([\w,]+)\]", " ".join(words)):
            assert set(group.split(",")) <= set(extras), words


# --- the slow tier --------------------------------------------------------------------------------------------------------
SMALL_CODE = """
import dpulr, torch
from tests.support.small_job import data, model
"""
PEOPLE = """
import numpy, torch, dpulr
rows = [{"x": numpy.full(4, i % 2, dtype="float32"), "y": i % 2, "sender": i // 2} for i in range(400)]
def data():
    columns = dpulr.data.Columns(rows, inputs="x", target="y")
    return columns, columns
def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 2))
"""


def small_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fashion-MNIST and CIFAR-10 with few records, where `dpulr data fetch` would put them; and FOLDER, to fetch from."""
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3072), dtype=np.uint8)
    pictures = struct.pack(">4i", 2051, 20, 28, 28) + pixels[:, :784].tobytes()
    labels = struct.pack(">2i", 2049, 20) + bytes(k % 10 for k in range(20))
    rows = np.concatenate([np.arange(20, dtype=np.uint8).reshape(-1, 1) % 10, pixels], axis=1).tobytes()
    monkeypatch.setenv("DPULR_DATA", "kept")
    monkeypatch.setattr(cifar, "RECORDS", 20)
    for attribute, places in {"FASHION": ["kept/fashion-mnist"], "CIFAR10": ["kept/cifar10", "FOLDER"]}.items():
        entry = getattr(catalog, attribute)
        files = {name: rows if attribute == "CIFAR10" else pictures if "images" in name else labels for name in entry.files}
        for place in map(Path, places):
            place.mkdir(parents=True)
            for name, raw in files.items():
                (place / name).write_bytes(raw)
        small = replace(entry, algorithm="md5", files={name: hashlib.md5(raw).hexdigest() for name, raw in files.items()})
        monkeypatch.setattr(catalog, attribute, small)
        monkeypatch.setitem(catalog.ENTRIES, entry.name, small)


def for_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my_code.py").write_text(SMALL_CODE)
    small_data_sets(monkeypatch)
    assert cli.main(["train", "--steps", "2", "--batch-size", "200", "--repeats", "1", "--evaluations", "1", "--out", "RUN"]) == 0


def for_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez("mine.npz", x=np.zeros((1, 28, 28), dtype="float32"), y=3)


def for_language_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support import tiny_bert

    Path("FOLDER").mkdir()
    tiny_bert.save(Path("FOLDER"))
    Path("reviews.csv").write_text("text,label\n" + "a very good film,1\na bad film,0\n" * 400)


def with_own_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the results, and a folder for a picture: figure-bound computes and draws, and must leave the clone as it is."""
    shutil.copytree(RESULTS, "results")
    Path("images").mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, "results")
    monkeypatch.setattr(documents, "draw_bound", partial(documents.draw_bound, Path("images")))


def for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my").mkdir()
    Path("my/module.py").write_text(PEOPLE)


def for_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = blocks(ROOT / "docs" / "scale.md", "python")[0]
    program = PROGRAMS["README-0"].replace("epochs=5", "steps=2").replace("mlp()", "mlp(seed=0)")
    Path("program.py").write_text(f"{begin}\n{program}\ndist.destroy_process_group()\n")


GIVEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "accounting.md": with_own_results,
    "audit.md": for_audit,
    "cli.md": for_cli,
    "language-models.md": for_language_models,
    "paper.md": with_own_results,
    "scale.md": for_scale,
    "users.md": for_users,
}
RUN = {name: run for name, commands in COMMANDS.items() if (run := [words for words in commands if of(ELSEWHERE, words) is None])}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run(page: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GIVEN.get(page, lambda _: None)(monkeypatch)
    for words in RUN[page]:
        added = shlex.split(of(ADDED, words) or "")
        if words[:2] == ["dpulr", "train"] and "--evaluations" not in words:
            added += ["--evaluations", "1"]
        assert (shlex.join(words), run(words, added)) == (shlex.join(words), CODES.get(" ".join(words), 0))


def run(words: list[str], added: list[str]) -> int:
    """In this process where that is possible: loading torch takes longer than most commands."""
    if words[0] == "dpulr":
        return cli.main([*words[1:], *added])
    if words[:3] == ["python", "-m", "reproduction"]:
        return reproduction([*words[3:], *added])
    start = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}[words[0]]
    environment = child_environment() | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    ended = subprocess.run([*start, *words[1:], *added], env=environment, capture_output=True, text=True, check=False)
    print(ended.stdout, ended.stderr)
    return ended.returncode
