"""Commands from outside: help, exit codes, import paths, plan, evaluate, the live view."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tests.support import small_job
from tests.support.small_cli import SMALL, Ended

from dpulr import accounting, runs
from dpulr.cli.live import LiveView

Cli = Callable[..., Ended]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def test_help_comes_at_once() -> None:
    """The best of several tries, since the machine may be busy; the limit is the promised one."""
    best = float("inf")
    for _ in range(8):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "dpulr.cli", "--help"], check=True, capture_output=True)
        best = min(best, time.perf_counter() - began)
        if best < 0.5:
            return
    pytest.fail(f"dpulr --help took {best:.2f} s")


def test_help_and_planning_import_nothing_heavy() -> None:
    code = """
import sys
from dpulr.cli import main
main(sys.argv[1:])
print(sorted({"torch", "matplotlib", "scipy"} & set(sys.modules)))
"""
    for arguments in (["--help"], ["train", "--help"], ["data", "list"]):
        shown = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True).stdout
        assert shown.splitlines()[-1] == "[]", arguments
    plan = ["plan", "--epsilon", "1", "--batch-size", "100", "--epochs", "1", "--dataset-size", "1000"]
    shown = subprocess.run([sys.executable, "-c", code, *plan], check=True, capture_output=True, text=True).stdout
    assert "torch" not in shown.splitlines()[-1]


@pytest.mark.parametrize("command", [[], ["train"], ["resume"], ["plan"], ["report"], ["evaluate"], ["data"], ["data", "fetch"]])
def test_every_option_has_a_help_line(command: list[str], run_cli: Cli) -> None:
    shown = run_cli(*command, "--help")
    assert shown.code == 0
    lines = shown.out.split("Options:\n")[1].split("\n\n")[0].splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("  --"):
            words = line.split("  ")
            assert any(word.strip() for word in words[2:]) or after.startswith("   "), line


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["tarin"], 2, "train"),
        (["train", "--epochs", "many"], 2, "--epochs"),
        (["train", "--epochs", "-1"], 2, "epochs is -1.0"),
        (["train", "--set", "colour=red"], 2, "'colour'"),
        (["train", "--set", "seed"], 2, "key=value"),
        (["train", "--config", "nowhere.toml"], 2, "nowhere.toml"),
        (["train", "--dataset", "letters"], 2, "'letters'"),
        (["train", "--model", "tree"], 2, "'tree'"),
        (["train", "--mechanism", "magic"], 2, "'magic'"),
        (["train", "--set", "mechanism.colour=1"], 2, "'colour'"),
        (["train", "--dataset", "nowhere:data"], 2, "'nowhere' can't be imported"),
        (["train", *SMALL, "--model", "tests.support.small_job:nothing"], 2, "'nothing'"),
        (["train", *SMALL, "--model", "tests.support.small_job:failing_model"], 2, "this model can't be made"),
        (["train", *SMALL, "--model", "tests.support.small_job:data"], 2, "torch.nn.Module"),
        (["train", *SMALL, "--dataset", "tests.support.small_job:model"], 2, "(train, test)"),
        (["train", *SMALL, "--batch-size", "1000"], 2, "only 200 records"),
        (["train", *SMALL, "--target-delta", "2"], 2, "target_delta is 2.0"),
        (["resume", "nowhere"], 2, "nowhere"),
        (["report", "nowhere"], 2, "nowhere"),
        (["evaluate", "."], 2, "not a run"),
        (["plan"], 2, "Too little is given"),
        (["plan", "--dims", "a,b"], 2, "--dims"),
        (["data", "fetch", "letters"], 2, "'letters'"),
    ],
)
def test_bad_input_is_explained(
    arguments: list[str], code: int, said: str, run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run_cli(*arguments)
    assert (ended.code, said in ended.err) == (code, True), ended.err
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_where_an_error_comes_from() -> None:
    command = [sys.executable, "-m", "dpulr.cli", "train", "--set", "colour=red"]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    loud = subprocess.run([*command, "--debug"], capture_output=True, text=True, check=False)
    assert plain.returncode == loud.returncode == 2
    assert "Traceback" not in plain.stderr
    assert "Traceback" in loud.stderr


def test_the_working_folder_is_searched_for_a_users_code(tmp_path: Path) -> None:
    (tmp_path / "my_models.py").write_text("from torch import nn\ndef tiny(): return nn.Linear(6, 3)\n")
    command = [sys.executable, "-m", "dpulr.cli", "train", *SMALL, "--model", "my_models:tiny", "--steps", "2", "--out", "run"]
    ended = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "guarantee certified" in ended.stdout
    assert "step 2 of 2   held-out accuracy" in ended.stdout  # not a terminal: plain lines
    assert "\x1b" not in ended.stdout


def test_plan_agrees_with_the_accountant(run_cli: Cli) -> None:
    shown = run_cli("plan", "--noise-multiplier", 2, "--batch-size", 100, "--epochs", 3, "--dataset-size", 10_000, "--json")
    found = json.loads(shown.out)
    assert found["solved_for"] == "epsilon"
    expected = accounting.gaussian_epsilon(noise_multiplier=2, sample_rate=0.01, steps=300, delta=1e-5)
    assert found["epsilon"] == pytest.approx(expected, rel=1e-12)


def test_evaluate_by_class(finished: Path, run_cli: Cli) -> None:
    found = json.loads(run_cli("evaluate", finished, "--json").out)
    assert found["accuracy"] == json.loads((finished / "result.json").read_text())["test_accuracy"]
    confusion = np.array(found["confusion"])
    assert confusion.sum() == 150
    assert np.trace(confusion) / 150 == pytest.approx(found["accuracy"])
    assert [row["records"] for row in found["classes"]] == [50, 50, 50]
    assert "accuracy" in run_cli("evaluate", finished).out
    ended = run_cli("evaluate", finished, "--dataset", "mnist")
    assert (ended.code, "does not fit" in ended.err) == (2, True)


def test_a_saved_model_is_a_black_box(finished: Path) -> None:
    box = runs.load(finished)
    _, test = small_job.data()
    inputs, labels = (tensor.numpy() for tensor in test.tensors)
    assert box(inputs).shape == (150, 3)
    scores = box.score()
    assert (box.classes(inputs) == labels).mean() == pytest.approx(scores.accuracy)
    assert runs.score(box, test).confusion == scores.confusion  # any callable can be scored


def test_the_live_view_shows_what_is_promised() -> None:
    console = Console(width=110, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    view = LiveView(console)
    about = {"dataset": "mnist", "parameters": 1_000, "mechanism": "gaussian", "noise_multiplier": 1.2, "sample_rate": 0.01}
    about |= {"guarantee": "certified", "planned_steps": 100, "steps_taken": 0, "target_epsilon": 2.0, "folder": "runs/x"}
    with view:
        view.note("calibrating")
        view.begin(about)
        for step in range(1, 51):
            view.step(step)
        for value in (0.5, 0.75):
            view.metrics({"step": 50, "test_accuracy": value, "test_loss": 0.7, "epsilon": 1.25})
        view.unprotected({"step": 50, "batch_size": 12, "training_loss": 0.3})
        console.print(view.picture())
    shown = console.export_text()
    for promised in ("50/100", "left", "75.00%", "0.7000", "epsilon 1.25 of 2", "UNPROTECTED"):
        assert promised in shown


def test_a_terminal_gets_the_live_view(tmp_path: Path) -> None:
    import pty

    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "dpulr.cli", "train", *SMALL, "--steps", "3", "--out", str(tmp_path / "live")]
    process = subprocess.Popen(command, env={**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "100"}, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    try:
        while block := os.read(main, 65536):
            shown += block
    except OSError:  # the terminal is gone: the process has ended
        pass
    assert process.wait() == 0
    assert b"\x1b[" in shown
    assert b"held-out accuracy" in shown
    assert "━".encode() in shown
