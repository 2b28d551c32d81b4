"""Commands from outside: help, exit codes, import paths, plan, evaluate, the live view."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from dpulr import accounting, errors, runs
from dpulr.auto import Task, batch_size_for
from dpulr.cli import main, options, train
from dpulr.cli.options import SPELLINGS
from dpulr.cli.progress import LiveView, make_view
from dpulr.runs.settings import Settings
from tests.support import small_job
from tests.support.small_cli import SMALL, Ended, Forked

Cli = Callable[..., Ended]


def test_help_and_planning_import_nothing_heavy() -> None:
    plan = ["plan", "--epsilon", "1", "--batch-size", "100", "--epochs", "1", "--dataset-size", "1000", "--dims", "4,4"]
    code = f"""
import sys
from dpulr.cli import main
for arguments in (["--help"], ["train", "--help"], ["data", "list"], {plan}):
    assert main(arguments) == 0
    print("loaded:", sorted({{"torch", "matplotlib", "scipy"}} & set(sys.modules)))
"""
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    *light, planned = [line for line in shown.splitlines() if line.startswith("loaded:")]
    assert light == ["loaded: []"] * 3
    assert "torch" not in planned


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
        (["plan", "--dims", "4,4"], 2, "--dataset-size"),
        (["plan", "--dims", "a,b"], 2, "--dims"),
        (["plan", "--mechanism", "paper"], 2, "no certified epsilon"),
        (["plan", "--set", "sampling=shuffle"], 2, "shuffled batches"),
        (["plan", "--seconds", "60"], 2, "--epochs instead of --seconds"),
        (["plan", "--steps", "5", "--epsilon", "1", "--noise-multiplier", "3", "--batch-size", "9", "--dims", "4"], 2, "--epochs"),
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


def test_debug_shows_where_an_error_comes_from(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--set", "colour=red"]
    assert main(command) == 2
    assert "Traceback" not in capfd.readouterr().err
    assert main([*command, "--debug"]) == 2
    assert "Traceback" in capfd.readouterr().err


def test_the_working_folder_is_searched_for_a_users_code(tmp_path: Path) -> None:
    (tmp_path / "my_models.py").write_text("from torch import nn\ndef tiny(): return nn.Linear(6, 3)\n")
    command = ["train", *SMALL, "--model", "my_models:tiny", "--steps", "2", "--out", "run"]
    ended = Forked(*command, folder=tmp_path, before=lambda: os.chdir(tmp_path)).end()
    assert ended.code == 0, ended.err
    assert "guarantee certified" in ended.out
    assert "step 2 of 2   held-out accuracy" in ended.out  # not a terminal: plain lines
    assert "\x1b" not in ended.out


@pytest.mark.parametrize("name", SPELLINGS)
def test_two_spellings_are_one_option(name: str, run_cli: Cli) -> None:
    first, second = (
        json.loads(run_cli("train", spelling, "0.25", "--dry-run").out)[name]
        for spelling in (f"--{name.replace('_', '-')}", SPELLINGS[name])
    )
    assert first == second == 0.25


# --- plan ---------------------------------------------------------------------------------------------------------------
GAUSSIAN = ("--mechanism", "gaussian", "--dims", "4")
SETTING = {"--epsilon": 1.0, "--noise-multiplier": 2.0, "--batch-size": 100, "--epochs": 3.0, "--dataset-size": 10_000}


def planned(run_cli: Cli, *arguments: object) -> dict[str, Any]:
    ended = run_cli("plan", *arguments, "--json")
    assert ended.code == 0, ended.err
    return dict(json.loads(ended.out))


@pytest.mark.parametrize("left_out", SETTING)
def test_plan_computes_the_one_that_is_left_out(left_out: str, run_cli: Cli) -> None:
    given = [x for name, value in SETTING.items() if name != left_out for x in (name, value)]
    found = planned(run_cli, *GAUSSIAN, *given)
    assert found["solved_for"] == left_out.removeprefix("--").replace("-", "_")
    noise, rate, steps = found["noise_multiplier"], found["sample_rate"], found["steps"]
    expected = accounting.gaussian_epsilon(noise_multiplier=noise, sample_rate=rate, steps=steps, delta=1e-5)
    assert found["epsilon"] == pytest.approx(expected, rel=1e-12)
    if left_out != "--epsilon":
        assert expected <= 1.0


def test_plan_fills_in_what_train_takes(run_cli: Cli) -> None:
    found = planned(run_cli, *GAUSSIAN, "--dataset-size", 60_000)
    size = batch_size_for(Task("gaussian", 60_000, (), 1.0, epochs=10))
    assert (found["epsilon"] <= 1, found["batch_size"], found["epochs"], found["delta"]) == (True, size, 10, 1e-5)
    assert (found["solved_for"], found["steps"]) == ("noise_multiplier", math.ceil(600_000 / size))
    back = planned(run_cli, *GAUSSIAN, "--dataset-size", 60_000, "--noise-multiplier", found["noise_multiplier"])
    assert (back["solved_for"], back["epsilon"]) == ("epsilon", found["epsilon"])
    most = planned(run_cli, *GAUSSIAN, "--dataset-size", 60_000, "--epsilon", 1, "--noise-multiplier", 5)
    assert (most["solved_for"], most["batch_size"]) == ("epochs", size)
    assert planned(run_cli, *GAUSSIAN, *(x for pair in SETTING.items() for x in pair))["solved_for"] == "delta"


JOBS = {
    "gaussian": ("--mechanism", "gaussian"),
    "hidden-direction": ("--mechanism", "hidden-direction", "--repeats", "2"),
    "an option of the mechanism": ("--mechanism", "hidden-direction", "--set", "mechanism.last_layer=exact"),
    "redrawn batches": ("--mechanism", "gaussian", "--rejection-threshold", "auto"),
    "epochs that are no whole number of steps": ("--batch-size", "60", "--epochs", "1", "--mechanism", "zeroth-order"),
}


@pytest.mark.parametrize("job", JOBS)
def test_plan_prints_the_noise_that_train_uses(job: str, run_cli: Cli, tmp_path: Path) -> None:
    """To all digits, with the same options."""
    options = [*SMALL[:4], "--batch-size", "20", "--epsilon", "2", "--epochs", "0.6", *JOBS[job]]
    found = planned(run_cli, *options)
    assert run_cli("train", *options, "--out", tmp_path / "run").code == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    for name in ("noise_multiplier", "epsilon", "steps", "sample_rate", "delta"):
        assert found[name] == result[name], name


def test_plan_leaves_evaluations_and_a_temperature_their_share(run_cli: Cli, tmp_path: Path) -> None:
    options = [*SMALL[:4], "--batch-size", "20", "--epsilon", "2", "--epochs", "0.6", "--mechanism", "gaussian"]
    options += ["--evaluation-epsilon", "0.5", "--temperature", "0.1"]
    found = planned(run_cli, *options)
    assert run_cli("train", *options, "--out", tmp_path / "run").code == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["noise_multiplier"] == result["noise_multiplier"]
    assert found["epsilon"] <= 2 * 0.9 - 0.5 < result["epsilon"] <= 2 == found["budget"]
    assert "the rest of 2" in run_cli("plan", *options).out


def test_plan_shows_the_layers(run_cli: Cli) -> None:
    found = planned(run_cli, *SMALL[:4], "--repeats", "2", "--batch-size", "20", "--noise-multiplier", "3")
    assert (found["dims"], found["repeats"], len(found["weights"])) == ([8, 3], [2, 2], 2)
    assert found["dataset_size"] == 200
    equal = planned(run_cli, "--dims", "8,3", "--repeats", "2", "--dataset-size", 200, "--batch-size", 20)
    assert (equal["dims"], equal["weights"]) == ([8, 3], [pytest.approx(1.0)] * 2)
    assert "weights: " in run_cli("plan", "--dims", "8,3", "--dataset-size", 200, "--batch-size", 20).out


# --- errors -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("problem", "code", "said"),
    [
        (errors.InvalidArgument("x is 3; it must be 4."), 2, "x is 3; it must be 4."),
        (errors.DataError("no data"), 2, "no data"),
        (errors.ModelRefused("no model"), 2, "no model"),
        (errors.UsageError("usage"), 2, "usage"),
        (errors.BudgetError("budget"), 3, "budget"),
        (errors.PrivacyRefusal("privacy"), 3, "privacy"),
        (errors.RunError("failed"), 1, "failed"),
        (errors.Interrupted("stopped"), 130, "stopped"),
        (KeyboardInterrupt(), 130, ""),
        (ValueError("a bug"), 1, "internal error: ValueError: a bug"),
        (TypeError("a bug"), 1, "--debug"),
        (errors.StepError("a bug"), 1, "internal error"),
        (OverflowError("a bug"), 1, "internal error"),
        (MemoryError(), 1, "memory"),
    ],
)
def test_exit_codes_by_kind(
    problem: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bug inside is never wrong usage, whatever its type."""

    def fails(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr("dpulr.runs.loading.load", fails)
    assert main(["evaluate", "anything"]) == code
    assert said in capsys.readouterr().err


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


def test_a_saved_model_takes_arrays(finished: Path) -> None:
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
    command, looks = ["train", *SMALL, "--steps", "3", "--out", tmp_path / "live"], {"TERM": "xterm", "COLUMNS": "100"}
    running = Forked(*command, folder=tmp_path, before=lambda: os.environ.update(looks), terminal=terminal)
    os.close(terminal)
    shown = b""
    try:
        while block := os.read(main, 65536):
            shown += block
    except OSError:  # the terminal is gone: the process has ended
        pass
    assert running.end().code == 0
    assert b"\x1b[" in shown
    assert b"held-out accuracy" in shown
    assert "━".encode() in shown


def test_fetching_is_shown_in_the_same_three_ways(capsys: pytest.CaptureFixture[str]) -> None:
    def work(view: Any) -> list[str]:
        with view:
            for done in (1, 2):
                view.progress("downloading", done, 2)
            view.end({"place": "here"}, "here")
        return capsys.readouterr().out.splitlines()

    assert work(make_view(as_json=False)) == ["downloading", "here"]
    assert [json.loads(line)["event"] for line in work(make_view(as_json=True))] == ["progress", "result"]
    console = Console(width=80, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    work(LiveView(console))
    assert "2/2" in console.export_text()


def test_a_users_module_is_imported_before_its_ledger_is_read(finished: Path, tmp_path: Path) -> None:
    """It may register a mechanism, and the kind of release that the ledger holds."""
    config = json.loads((finished / "config.json").read_text())
    (finished / "config.json").write_text(json.dumps({**config, "model": "my_mechanism:model"}))
    (tmp_path / "my_mechanism.py").write_text("print('registered')\n")
    ended = Forked("report", finished, folder=tmp_path, before=lambda: os.chdir(tmp_path)).end()
    assert "registered" in ended.out
    assert (ended.code, "config.json is not the one" in ended.err) == (3, True)


def test_warnings_are_sentences(tmp_path: Path, run_cli: Cli) -> None:
    """The library's own; another's stay as they are."""
    with warnings.catch_warnings(action="always"):
        ended = run_cli("train", *SMALL, "--steps", 1, "--evaluations", 0, "--out", tmp_path / "run")
    (said,) = [line for line in ended.err.splitlines() if "200 records" in line]
    assert said.startswith("dpulr: the data set has 200 records; with fewer than")
    assert "Warning" not in ended.err


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Still(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime(2026, 1, 2, 3, 4, 5)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "datetime", Still)
    for name in ("20260102-030405-search", "20260102-030405-search-2", "20260102-030405-search-3"):
        folder = options.new_folder("search")
        assert folder == Path("runs") / name
        folder.mkdir(parents=True)


@pytest.mark.parametrize(
    ("dataset", "mechanism", "name"),
    [
        ("mnist", "gaussian", "mnist-gaussian"),
        ("csv:census.csv", "gradient", "csv.census.csv-gradient"),
        ("csv:/home/me/census.csv", "gradient", "census.csv-gradient"),
        (r"csv:C:\data\census.csv", "gradient", "census.csv-gradient"),
        ("my.module:data", "my.module:Votes", "my.module.data-my.module.Votes"),
    ],
)
def test_a_run_is_named_by_what_every_system_has_in_names(
    dataset: str, mechanism: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "new_folder", Path)
    assert train._default_folder(Settings(dataset=dataset, mechanism=mechanism)) == Path(name)


@pytest.mark.parametrize(("shell", "said"), [("bash", "complete_bash"), ("zsh", "complete_zsh")])
def test_a_shell_completes_commands_and_options(
    shell: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What `dpulr --install-completion` puts into a shell's start-up, and what the shell then asks."""
    monkeypatch.setenv("_DPULR_COMPLETE", f"source_{shell}")
    assert main([]) == 0
    assert f"_DPULR_COMPLETE={said}" in capfd.readouterr().out
    monkeypatch.setenv("_DPULR_COMPLETE", said)
    for words, answer in (("dpulr tr", "train"), ("dpulr train --eps", "--epsilon"), ("dpulr train --learning", "--learning-rate")):
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", words)
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        assert main([]) == 0
        assert answer in capfd.readouterr().out
