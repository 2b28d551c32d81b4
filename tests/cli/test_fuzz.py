"""Random arguments and random damage to files: always an exit code that means something, never a traceback, nothing lost.

Each kind of case has a small number in the quick tests and a large one, more than 10,000 in all, in the slow ones.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dpulr.data import fetch
from dpulr.errors import DataError, RunError
from dpulr.runs import checkpoint
from dpulr.runs import run as running
from dpulr.runs.settings import NAMES
from tests.support.small_cli import SMALL, Ended

Cli = Callable[..., Ended]
CODES = {0, 1, 2, 3}
JUNK = (
    *("", "-", "--", "=", "x", "0", "-1", "1", "3", "1e400", "-1e400", "nan", "inf", "1e-320", "None", "none", "true", "auto"),
    *("é", "☃", "a" * 3000, "9" * 400, "1.5", "\udcff", "a b", "[", "{", '"', "'", "\n", "1,2", "16,16"),
    *("os:system", "nothing:at_all", ":", "a:", ":b", "tests.support.small_job:failing_model", "tests.support.small_job:missing"),
    *("mlp", "mnist", "gaussian", "hidden-direction", "poisson", "..", "/", "/dev/null"),
)
OPTIONS = (*(f"--{name.replace('_', '-')}" for name in NAMES), "--set", "--config", "--json", "--dry-run", "--show-unprotected")
PLAN = (
    *("--epsilon", "--delta", "--noise-multiplier", "--batch-size", "--epochs", "--dataset-size", "--mechanism", "--dims"),
    *("--repeats", "--steps", "--rejection-threshold", "--set"),
)


def counts(quick: int, slow: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cases", [quick, pytest.param(slow, marks=pytest.mark.slow)])


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """One to three changes: bytes flipped, cut out, put in, repeated, or the end missing."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.choice((1, 2, 30, 400))]
        elif kind == 2:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 5, 60))))
        elif kind == 3:
            data[at:at] = data[at : at + rng.choice((1, 40, 300))]
        elif kind == 4:
            del data[at:]
        else:
            data[at : at + 1] = rng.choice((b"null", b"-1", b"[]", b"{}", b"1e999", b'"', b"\n", b"\x00", b"9" * 30, b"true"))
    return bytes(data)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


# --- arguments ----------------------------------------------------------------------------------------------------------
def arguments(rng: random.Random) -> Iterator[str]:
    command = rng.choice(("train", "train", "train", "resume", "report", "evaluate", "plan", "data", "", "--help", "tarin"))
    if command:
        yield command
    if command == "data":
        yield rng.choice(("list", "fetch", "x"))
    known = PLAN if command == "plan" else OPTIONS
    if command == "plan":  # without a model: what is planned here is thousands of settings
        yield from ("--dims", rng.choice(("4,4", "16", "x", "")))
    for _ in range(rng.randint(0, 6)):
        if rng.random() < 0.75:
            yield rng.choice(known)
        if rng.random() < 0.8:
            yield f"{rng.choice(NAMES)}={rng.choice(JUNK)}" if rng.random() < 0.2 else rng.choice(JUNK)


@counts(40, 2_500)
def test_arguments(cases: int, run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training itself is replaced: what counts here is how arguments are read."""

    def no_download(*_: object) -> Path:
        raise DataError("not in this test.")

    def no_training(*_: object, **__: object) -> dict[str, object]:
        raise RunError("this is where training would begin.")

    monkeypatch.setattr(running, "start", no_training)
    monkeypatch.setattr(fetch, "download", no_download)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DPULR_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    rng = random.Random(11)
    seen = set()
    for _ in range(cases):
        given = list(arguments(rng))
        ended = run_cli(*given)
        assert ended.code in CODES, given
        assert ended.code == 0 or ended.err or ended.out, given
        assert "With --debug" not in ended.err, (given, ended.err)  # that would be an error nobody has thought of
        seen.add(ended.code)
    assert {0, 2} <= seen


@counts(3, 100)
def test_values(cases: int, run_cli: Cli, tmp_path: Path) -> None:
    """Numbers of all sizes in a real training."""
    rng = random.Random(12)
    numbers = ("0", "-1", "1", "2", "0.5", "1e-12", "0.999999", "1e9", "1e-5", "3", "1e308", "7.5")
    options = ("--target-delta", "--noise-multiplier", "--learning-rate", "--momentum", "--schedule", "--rejection-threshold")
    options += ("--min-dataset-size", "--evaluations", "--batch-size", "--target-epsilon", "--repeats", "--seed")
    for case in range(cases):
        given = [x for _ in range(rng.randint(1, 3)) for x in (rng.choice(options), rng.choice(numbers))]
        folder = tmp_path / str(case)
        ended = run_cli("train", *SMALL, "--steps", 3, *given, "--out", folder)
        assert ended.code in CODES, given
        assert "With --debug" not in ended.err, (given, ended.err)
        assert folder.exists() or ended.code != 0
        if ended.code == 0:
            found = json.loads((folder / "result.json").read_text())
            assert found["epsilon"] <= found["target_epsilon"], given


# --- config files -------------------------------------------------------------------------------------------------------
CONFIG = b"""batch_size = 30
epochs = 3.5
target_epsilon = 1.5
rejection_threshold = "auto"
sampling = "poisson"
seed = 1
[mechanism]
name = "gaussian"
sigma = 0.2
repeats = 5
"""


@counts(20, 2_000)
def test_configs(cases: int, run_cli: Cli, tmp_path: Path) -> None:
    rng = random.Random(13)
    for case in range(cases):
        path = tmp_path / rng.choice(("config.toml", "config.json"))
        raw = CONFIG if path.suffix == ".toml" else json.dumps({"seed": 3, "epochs": 2, "mechanism_options": {"sigma": 1}}).encode()
        if case % 2:
            name, value = rng.choice((*NAMES, "mechanism_options", "other")), rng.choice(JUNK)
            raw = f"{name} = {value if rng.random() < 0.5 else json.dumps(value)}\n".encode("utf-8", "surrogateescape") + CONFIG
            path = path.with_suffix(".toml")
        else:
            raw = damaged(raw, rng)
        path.write_bytes(raw)
        ended = run_cli("train", "--config", path, "--dry-run")
        assert ended.code in (0, 2), raw
        assert ended.code == 0 or "dpulr: " in ended.err
        if ended.code == 0:  # what is accepted can be read back
            again = tmp_path / "again.json"
            again.write_text(ended.out)
            assert run_cli("train", "--config", again, "--dry-run").out == ended.out
        assert path.read_bytes() == raw


# --- the files of a run -------------------------------------------------------------------------------------------------
@counts(15, 1_000)
def test_run_files(cases: int, finished: Path, run_cli: Cli) -> None:
    """A changed ledger, head or config is refused, and the run is left as it was."""
    whole = content(finished)
    rng = random.Random(14)
    refused = 0
    for _ in range(cases):
        name = rng.choice(("ledger.jsonl", "ledger.jsonl", "ledger.jsonl", "ledger.head", "config.json"))
        raw = damaged(whole[name], rng)
        (finished / name).write_bytes(raw)
        before = content(finished)
        ended = run_cli("resume", finished)
        assert ended.code in CODES, (name, raw)
        assert "With --debug" not in ended.err, (name, raw, ended.err)
        if ended.code == 0:  # only what changes nothing may be accepted
            kept = raw[: raw.rfind(b"\n") + 1] == whole[name] if name == "ledger.jsonl" else raw.split() == whole[name].split()
            assert kept, (name, raw)
        else:
            refused += 1
            assert content(finished) == before
            if name != "config.json":
                assert ended.code == 3, (name, raw, ended.err)
        (finished / name).write_bytes(whole[name])
    assert refused > 0.9 * cases
    assert run_cli("resume", finished).code == 0


@counts(15, 800)
def test_checkpoints(cases: int, finished: Path, run_cli: Cli) -> None:
    """Damaged weights are refused by name; they are never taken for others."""
    rng = random.Random(15)
    path = finished / checkpoint.MODEL
    whole, (tensors, _) = path.read_bytes(), checkpoint.read(path)
    accuracy = json.loads(run_cli("evaluate", finished, "--json").out)["accuracy"]
    for _ in range(cases):
        raw = damaged(whole, rng)
        path.write_bytes(raw)
        ended = run_cli("evaluate", finished, "--json")
        assert ended.code in (0, 1), raw
        if ended.code:
            assert checkpoint.MODEL in ended.err
        else:
            assert all(torch.equal(tensor, tensors[name]) for name, tensor in checkpoint.read(path)[0].items())
            assert json.loads(ended.out)["accuracy"] == accuracy
        assert path.read_bytes() == raw
    path.write_bytes(whole)


@counts(2, 100)
def test_reports_of_damaged_metrics(cases: int, finished: Path, run_cli: Cli) -> None:
    """What is only for looking at may be damaged: the report shows the rest, and the ledger still decides what was spent."""
    rng = random.Random(16)
    for case in range(cases):
        folder = finished.with_name(f"copy-{case}")
        shutil.copytree(finished, folder)
        for name in ("metrics.jsonl", "result.json"):
            (folder / name).write_bytes(damaged((folder / name).read_bytes(), rng))
        ended = run_cli("report", folder)
        assert ended.code == 0, ended.err
        assert "after 12 steps of the gaussian mechanism" in (folder / "report.html").read_text()
        shutil.rmtree(folder)
