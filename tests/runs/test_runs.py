"""Run folders: what they hold, going on, budgets, locks, signals, and what is never stored."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dpulr
from dpulr import accounting
from dpulr.accounting.disk_ledger import DiskLedger, ledger_digest
from dpulr.accounting.rounding import up
from dpulr.cli.progress import summary
from dpulr.files import read_lines
from dpulr.runs import Interrupted, PrivacyRefusal, Settings, checkpoint, train_and_evaluate
from dpulr.runs.config_files import read_config
from dpulr.runs.folder import locked
from dpulr.runs.loading import load_data, make_mechanism, make_model
from dpulr.runs.process import Stop
from tests.support.small_cli import SMALL, Ended, Forked

Cli = Callable[..., Ended]


def result(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "result.json").read_text()))


def ledger(folder: Path) -> DiskLedger:
    return DiskLedger.open(folder, ledger_digest((folder / "config.json").read_bytes()))


def test_the_defaults_are_the_main_job() -> None:
    main = Settings()
    assert make_mechanism(main) == dpulr.HiddenDirection()  # the same default as in a program
    assert (main.dataset, main.batch_size, main.epochs, main.target_epsilon) == ("mnist", "auto", 10, 1.0)
    assert (main.repeats, main.learning_rate) == ("auto", "auto")
    assert isinstance(make_model(main), type(dpulr.models.mlp()))


def test_a_holdout_comes_from_the_training_set() -> None:
    job = Settings(dataset="tests.support.small_job:data", holdout=30)
    whole, _ = load_data(Settings(dataset="tests.support.small_job:data"))
    train, test = load_data(job)
    assert (len(train), len(test)) == (170, 30)
    assert torch.equal(torch.stack([x for x, _ in test]), whole.tensors[0][170:])


def test_a_run_without_a_folder() -> None:
    small = {"dataset": "tests.support.small_job:data", "model": "tests.support.small_job:model", "mechanism": "gaussian"}
    seen: list[tuple[int, int]] = []
    job = Settings(**small, batch_size=20, steps=3, target_epsilon=2.0, repeats=2, schedule="constant", holdout=30)
    found = train_and_evaluate(job, lambda taken, planned, model: seen.append((taken, planned)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert (found["guarantee"], found["steps"], found["settings"]) == ("certified", 3, job.to_dict())
    assert found["epsilon"] <= 2
    assert found["sample_rate"] == 20 / 170


def test_a_run_is_a_folder(finished: Path) -> None:
    names = {path.name for path in finished.iterdir() if not path.name.startswith(".")}
    assert names == {
        *("config.json", "ledger.jsonl", "ledger.head", "metrics.jsonl", "result.json"),
        *("model.safetensors", "checkpoint.safetensors"),
    }
    found = result(finished)
    for field in (
        *("mechanism", "guarantee", "epsilon", "nominal_epsilon", "delta", "steps", "sample_rate", "noise_multiplier"),
        *("test_accuracy", "seconds", "forward_passes", "seed", "version"),
    ):
        assert field in found
    assert found["guarantee"] == "certified"
    noise = float(str(found["noise_multiplier"]))
    ideal = accounting.gaussian_epsilon(noise_multiplier=noise, sample_rate=0.1, steps=12, delta=1e-5)
    assert ideal < found["epsilon"] < 1.0001 * ideal  # rounding costs a little
    assert found["forward_passes"] == 12 * (1 + 2 * 2 * 2)
    assert [line["step"] for line in read_lines(finished / "metrics.jsonl")] == [4, 8, 12]


def test_config_alone_repeats_the_run(finished: Path, tmp_path: Path, run_cli: Cli) -> None:
    again = tmp_path / "again"
    assert run_cli("train", "--config", finished / "config.json", "--out", again).code == 0
    assert (again / "config.json").read_bytes() == (finished / "config.json").read_bytes()
    first, second = result(finished), result(again)
    assert {k: first[k] for k in ("epsilon", "steps", "noise_multiplier")} == {
        k: second[k] for k in ("epsilon", "steps", "noise_multiplier")
    }
    assert first["run"] != second["run"]
    weights = [load_file(folder / "model.safetensors")["0.weight"] for folder in (finished, again)]
    assert not torch.equal(*weights)  # the noise is never the same


def test_toml_options_and_sets(tmp_path: Path, run_cli: Cli) -> None:
    config = tmp_path / "job.toml"
    config.write_text('batch_size = 30\nepochs = 3\nseed = 1\n[mechanism]\nname = "gaussian"\nsigma = 0.2\nrepeats = 5\n')
    ended = run_cli("train", "--config", config, "--epochs", 4, "--set", "seed=9", "--set", "mechanism.sigma=0.3", "--dry-run")
    found = json.loads(ended.out)
    assert (found["batch_size"], found["epochs"], found["seed"], found["repeats"]) == (30, 4.0, 9, 5)
    assert (found["mechanism"], found["mechanism_options"]) == ("gaussian", {"sigma": 0.3})
    assert run_cli("train", "--set", "target_epsilon=none", "--set", "noise_multiplier=2", "--dry-run").code == 0


def test_a_config_can_hold_everything(tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(
        'out = "here"\njson = true\nshow_unprotected = true\nallow_uncertified = true\nsampling = "shuffle"\nsteps = 2\n'
        'dataset = "tests.support.small_job:data"\nmodel = "tests.support.small_job:model"\n'
        'mechanism = "gaussian"\nbatch_size = 20\ntarget_epsilon = 2\n'
    )
    ended = run_cli("train", "--config", "job.toml")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out.splitlines()[-1])["guarantee"] == "none"
    assert Path("here/unprotected.jsonl").exists()
    Path("job.toml").write_text("json = 3\n")
    assert run_cli("train", "--config", "job.toml").code == 2


def test_what_is_not_covered_is_not_stored(finished: Path, tmp_path: Path, run_cli: Cli) -> None:
    stored = b"".join(path.read_bytes() for path in finished.iterdir() if path.suffix in (".json", ".jsonl", ".head"))
    assert b"training_loss" not in stored
    assert b'unprotected_shown": false' in stored
    folder = tmp_path / "open"
    ended = run_cli("train", *SMALL, "--steps", 3, "--out", folder, "--show-unprotected")
    lines = read_lines(folder / "unprotected.jsonl")
    assert len(lines) == 3
    assert all(line["unprotected"] is True and {"batch_size", "training_loss"} < set(line) for line in lines)
    assert ended.out.count("UNPROTECTED, not covered by the guarantee") == 3
    assert result(folder)["unprotected_shown"] is True
    assert not any("training_loss" in line for line in read_lines(folder / "metrics.jsonl"))


def test_json_lines(tmp_path: Path, run_cli: Cli) -> None:
    ended = run_cli("train", *SMALL, "--steps", 3, "--out", tmp_path / "run", "--json")
    events = [json.loads(line) for line in ended.out.splitlines()]
    assert [event["event"] for event in events if event["event"] != "note"] == ["begin", "metrics", "metrics", "metrics", "result"]
    assert events[-1]["epsilon"] == result(tmp_path / "run")["epsilon"]


# --- budget -------------------------------------------------------------------------------------------------------------
def test_training_stops_before_the_budget(tmp_path: Path, run_cli: Cli) -> None:
    folder = tmp_path / "run"
    assert run_cli("train", *SMALL, "--steps", 500, "--noise-multiplier", 2, "--out", folder).code == 0
    found = result(folder)
    steps = int(str(found["steps"]))
    assert 0 < steps < 500
    price = [accounting.gaussian_epsilon(noise_multiplier=2, sample_rate=0.1, steps=n, delta=1e-5) for n in (steps, steps + 1)]
    assert price[0] <= 2 < price[1]
    assert run_cli("resume", folder).code == 0
    assert result(folder) == found
    refused = run_cli("resume", folder, "--steps", steps + 1)
    assert refused.code == 3
    assert "Raise it with --target-epsilon" in refused.err
    assert run_cli("resume", folder, "--target-epsilon", 1.5).code == 3
    assert ledger(folder).steps == steps


def test_raising_the_budget_is_explicit_and_recorded(finished: Path, run_cli: Cli) -> None:
    assert run_cli("resume", finished, "--target-epsilon", 2.3).code == 0
    after = ledger(finished)
    assert after.budget == 2.3
    assert after.steps > 12
    assert 2 < after.epsilon(1e-5) <= 2.3
    assert accounting.epsilon([accounting.Charge(after.charges[0].step, after.steps + 1)], 1e-5) > 2.3  # as many as fit
    entry = next(line for line in read_lines(finished / "ledger.jsonl") if line["kind"] == "resume")
    assert (entry["raised_from"], entry["target_epsilon"]) == (2.0, 2.3)
    assert json.loads((finished / "config.json").read_text())["target_epsilon"] == 2.0


def test_a_budget_too_small_for_one_step_is_refused(tmp_path: Path, run_cli: Cli) -> None:
    ended = run_cli(
        "train", *SMALL, "--steps", 5, "--noise-multiplier", "0.3", "--target-epsilon", "0.1", "--out", tmp_path / "run"
    )
    assert (ended.code, "not one step fits" in ended.err) == (3, True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("voiding", [("--sampling", "shuffle"), ("--insecure-noise-seed", "3")])
def test_no_guarantee_must_be_asked_for(tmp_path: Path, run_cli: Cli, voiding: tuple[str, str]) -> None:
    arguments = ("train", *SMALL, "--steps", 4, *voiding, "--out", tmp_path / "run")
    assert run_cli(*arguments).code == 3
    assert run_cli(*arguments, "--allow-uncertified").code == 0
    found = result(tmp_path / "run")
    assert (found["guarantee"], found["epsilon"]) == ("none", None)


# --- going on -----------------------------------------------------------------------------------------------------------
def test_steps_after_the_checkpoint_count_as_spent(finished: Path, run_cli: Cli) -> None:
    """As if the process had been killed in the middle of two steps after the checkpoint."""
    before = ledger(finished)
    step = before.charges[0].step
    before.append(step)
    before.append(step)
    assert run_cli("resume", finished, "--target-epsilon", 3, "--steps", 16).code == 0
    found = result(finished)
    assert (found["steps"], found["updates_kept"], found["resumes"]) == (16, 14, 1)
    assert found["epsilon"] == ledger(finished).epsilon(1e-5)


def test_checkpoints_hold_no_pickle_and_no_generator(finished: Path) -> None:
    tensors, about = checkpoint.read(finished / checkpoint.CHECKPOINT)
    assert set(about) == {"run", "steps", "applied", "entries", "head", "optimizer", "groups", "mechanism", "temperature"}
    assert {name.split(".")[0] for name in tensors} == {"model", "optimizer"}
    assert sum(t.numel() for t in tensors.values()) == 2 * 83  # weights and momentum, nothing else


def test_resumed_runs_draw_fresh_entropy(finished: Path, tmp_path: Path, run_cli: Cli) -> None:
    """Two copies of one state, resumed: were noise repeated from a stored generator, they would agree."""
    copies = []
    for name in ("a", "b"):
        copy = tmp_path / name
        copy.mkdir()
        for path in finished.iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
        assert run_cli("resume", copy, "--target-epsilon", 2.2, "--steps", 13).code == 0
        copies.append(load_file(copy / "model.safetensors")["0.weight"])
    assert not torch.equal(*copies)


def test_the_optimizer_survives_a_resume(finished: Path) -> None:
    tensors, _ = checkpoint.read(finished / checkpoint.CHECKPOINT)
    model = make_model(Settings.build(read_config(finished / "config.json")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    checkpoint.load_training(finished, run=str(result(finished)["run"]), model=model, optimizer=optimizer)
    momentum = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    assert all(torch.equal(m, tensors[f"optimizer.{i}.momentum_buffer"]) for i, m in enumerate(momentum))
    assert torch.equal(load_file(finished / "model.safetensors")["0.weight"], model[0].weight)  # type: ignore[index]


def test_adam_round_trip(tmp_path: Path) -> None:
    """Optimizers with whole numbers, pairs and switches in their state."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.95))
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    checkpoint.save_training(tmp_path, model=model, optimizer=optimizer, about={"run": "x"})
    other = torch.nn.Linear(3, 2)
    restored = torch.optim.Adam(other.parameters())
    checkpoint.load_training(tmp_path, run="x", model=other, optimizer=restored)
    for first, second in ((optimizer, restored),):
        first.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        second.zero_grad()
        other(torch.ones(1, 3)).sum().backward()
        first.step()
        second.step()
    assert torch.equal(model.weight, other.weight)


def test_a_second_process_is_refused(finished: Path, run_cli: Cli) -> None:
    handle = os.open(finished / ".lock", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        ended = run_cli("resume", finished)
        assert (ended.code, "another process" in ended.err) == (3, True)
    finally:
        os.close(handle)
    assert run_cli("resume", finished).code == 0


def test_the_lock_ends_with_its_process_and_names_its_run(tmp_path: Path) -> None:
    ready, tell = os.pipe()
    (tmp_path / ".lock").write_text("a run")
    holder = os.fork()
    if holder == 0:
        with locked(tmp_path):
            os.write(tell, b"x")
            signal.pause()
    try:
        os.read(ready, 1)
        with pytest.raises(PrivacyRefusal, match="another process"), locked(tmp_path):
            pass
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    for _ in range(2):
        with locked(tmp_path) as owner:
            assert owner == "a run"


def test_a_new_folder_appears_as_windows_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Cli) -> None:
    """There no folder is renamed in which a file is open, or onto another folder."""
    folder, renamed, replace = tmp_path / "run", [], os.replace
    folder.mkdir()

    def strict(source: Path, target: Path) -> None:
        if Path(source).is_dir():
            renamed.append(target)
            assert not Path(target).exists()
            assert not any(
                os.readlink(entry).startswith(str(source)) for entry in Path("/proc/self/fd").iterdir() if entry.exists()
            )
        replace(source, target)

    monkeypatch.setattr("os.replace", strict)
    assert run_cli("train", *SMALL, "--steps", 1, "--evaluations", 0, "--out", folder).code == 0
    assert renamed == [folder]
    assert len((folder / ".lock").read_text()) == 16


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signals_end_cleanly(tmp_path: Path, number: int, run_cli: Cli) -> None:
    folder = tmp_path / "run"
    forked = Forked("train", *SMALL, "--steps", "100000", "--out", folder, folder=tmp_path)
    while forked.running():
        if (folder / "ledger.jsonl").exists() and (folder / "ledger.jsonl").read_bytes().count(b"\n") > 8:
            break
        time.sleep(0.02)
    os.kill(forked.process, number)
    ended = forked.end()
    assert ended.code == 130
    err = ended.err
    assert "Traceback" not in err
    assert "dpulr resume" in err
    found = result(folder)
    assert found["status"] == "interrupted"
    assert found["epsilon"] < found["planned_epsilon"]
    both = accounting.stopped_early(found["epsilon"], found["planned_epsilon"])
    assert both in err
    assert f"Interrupted: {both}." in summary(found)
    assert run_cli("report", folder).code == 0
    text = (folder / "report.html").read_text()
    assert f"<b>{up(found['planned_epsilon'])}</b><span>epsilon of all planned steps</span>" in text
    assert checkpoint.read(folder / checkpoint.CHECKPOINT)[1]["steps"] == found["steps"] == ledger(folder).steps


def test_a_damaged_checkpoint_is_refused_and_nothing_is_lost(finished: Path, run_cli: Cli) -> None:
    path = finished / checkpoint.CHECKPOINT
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:], b"\xff" * 50):
        path.write_bytes(damaged)
        before = {file.name: file.read_bytes() for file in finished.iterdir()}
        ended = run_cli("resume", finished, "--target-epsilon", 2.2, "--steps", 13)
        assert (ended.code, checkpoint.CHECKPOINT in ended.err) == (1, True)
        assert {file.name: file.read_bytes() for file in finished.iterdir()} == before
    path.unlink()
    assert run_cli("resume", finished, "--target-epsilon", 2.2, "--steps", 13).code == 0
    assert (result(finished)["steps"], result(finished)["updates_kept"]) == (13, 1)


def test_a_signal_while_setting_up_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stop(), pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGTERM)
    with Stop() as stop:
        stop.at_once = False
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(Interrupted):  # the second time in any case
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_existing_folder_is_left_alone(finished: Path, tmp_path: Path, run_cli: Cli) -> None:
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    ended = run_cli("train", *SMALL, "--out", finished)
    assert (ended.code, "dpulr resume" in ended.err) == (2, True)
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before


PAPER = (
    *("--dataset", "tests.support.small_job:data", "--model", "tests.support.small_job:model"),
    *("--mechanism", "paper", "--batch-size", "20"),
    *("--noise-multiplier", "4", "--evaluations", "3", "--learning-rate", "0.05", "--set", "mechanism.remedy=extra-noise"),
)


def test_without_options_the_papers_method_has_the_papers_setting() -> None:
    job = Settings.build(options={"mechanism": "paper"})
    assert (job.batch_size, job.noise_multiplier, job.rejection_threshold, job.sampling) == (500, 4.0, 450, "poisson")
    assert (job.target_epsilon, job.epochs) == (None, 10.0)
    assert make_mechanism(job) == dpulr.Paper()
    own = Settings.build(options={"mechanism": "paper", "batch_size": 100}, sets=["mechanism.target_std=3", "sampling=shuffle"])
    assert (own.batch_size, own.noise_multiplier) == (100, None)


def test_a_run_of_the_papers_method_has_a_nominal_epsilon_only(tmp_path: Path, run_cli: Cli) -> None:
    folder = tmp_path / "run"
    ended = run_cli("train", *PAPER, "--steps", 4, "--out", folder)
    assert ended.code == 0, ended.err  # nominal: it need not be asked for
    first = result(folder)
    assert (first["epsilon"], first["guarantee"], first["steps"]) == (None, "nominal", 4)
    assert "epsilon none (nominal" in ended.out
    assert run_cli("resume", folder, "--steps", 7).code == 0
    second = result(folder)
    assert (second["epsilon"], second["guarantee"], second["steps"]) == (None, "nominal", 7)
    assert float(str(second["nominal_epsilon"])) > float(str(first["nominal_epsilon"])) > 0
    assert run_cli("report", folder).code == 0
    assert 'class="guarantee warning"' in (folder / "report.html").read_text()


def test_the_papers_settings_by_layer_and_step_from_the_command_line(tmp_path: Path, run_cli: Cli) -> None:
    folder = tmp_path / "run"
    sets = ("mechanism.target_std={0 = 4, 2 = [5, 6]}", "mechanism.repeats=[2, 3]", "mechanism.rejection_threshold=3")
    arguments = [*PAPER[:-2], *(word for text in sets for word in ("--set", text)), "--steps", "3", "--allow-uncertified"]
    arguments = [word for word in arguments if word not in ("--noise-multiplier", "4")]
    ended = run_cli("train", *arguments, "--out", folder)
    assert ended.code == 0, ended.err
    steps = [charge.step for charge in ledger(folder).charges]
    assert [(step.release.target_std, step.rejection_threshold) for step in steps] == [(4.0, 3), (5.0, 3)]
    few = (*PAPER[:-2], "--batch-size", 2, "--set", "mechanism.remedy=none", "--steps", 2, "--allow-uncertified")
    assert "No sigma meets the paper's condition" in run_cli("train", *few, "--out", tmp_path / "refused").err
