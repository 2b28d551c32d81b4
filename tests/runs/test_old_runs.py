"""Run folders of version 0.1.0: they are read and go on, or are refused by a sentence that names the version.

`version_0_1_0` was written by that version: hidden-direction, stopped by SIGTERM after 5 of 12 steps.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dpulr.errors import UsageError
from dpulr.runs import Settings
from dpulr.runs.folder import open_config
from dpulr.runs.old_configs import upgraded
from tests.support.small_cli import Ended

Cli = Callable[..., Ended]
OLD = Path(__file__).parent / "version_0_1_0"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def config(**changed: object) -> dict[str, object]:
    return {**json.loads((OLD / "config.json").read_text()), **changed}


def test_an_old_run_is_read_and_goes_on(old: Path, run_cli: Cli) -> None:
    before = json.loads((old / "result.json").read_text())
    assert (before["version"], before["steps"], before["status"]) == ("0.1.0", 5, "interrupted")
    assert run_cli("report", old).code == 0
    assert "after 5 steps of the hidden-direction mechanism" in (old / "report.html").read_text()
    assert json.loads(run_cli("evaluate", old, "--json").out)["accuracy"] == before["test_accuracy"]
    ended = run_cli("resume", old)
    assert ended.code == 0, ended.err
    after = json.loads((old / "result.json").read_text())
    assert (after["steps"], after["updates_kept"], after["resumes"]) == (12, 12, 1)
    assert after["noise_multiplier"] == before["noise_multiplier"]
    assert before["epsilon"] < after["epsilon"] <= 2.0


def test_defaults_of_then_are_kept() -> None:
    settings, _ = open_config(OLD)
    assert settings.mechanism_options == {"antithetic": True}
    said = upgraded(config(mechanism_options={"antithetic": False, "blocks": 2, "frames": 1}))
    assert said["mechanism_options"] == {"antithetic": False, "groups": 2}
    assert upgraded(config(mechanism="gaussian"))["mechanism_options"] == {}


@pytest.mark.parametrize("gone", [{"average": 0.9}, {"mechanism_options": {"frames": 2}}])
def test_what_is_gone_is_refused_by_version(gone: dict[str, object], old: Path, run_cli: Cli) -> None:
    with pytest.raises(UsageError, match=r"dpulr 0\.1\.0"):
        upgraded(config(**gone))
    (old / "config.json").write_text(json.dumps(config(**gone)))
    for command in ("resume", "report", "evaluate"):
        ended = run_cli(command, old)
        assert (ended.code, "version 0.1.0" in ended.err) == (2, True)


def test_configs_name_their_version_and_are_not_upgraded() -> None:
    text = json.loads(Settings(mechanism="hidden-direction").to_json())
    assert text["version"]
    assert upgraded(text) == text
    assert Settings.build(text) == Settings()
    with pytest.raises(UsageError, match=r"written by dpulr 99\.0"):
        Settings.build({"version": "99.0", "colour": "red"})
