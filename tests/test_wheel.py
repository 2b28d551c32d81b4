"""The wheel in an empty environment, as a new user has it; and what training really needs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def program(page: str, number: int = 0) -> str:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[number]


@pytest.mark.slow
def test_a_new_user_gets_along_with_the_wheel(tmp_path: Path) -> None:
    """In an empty environment: the README, the estimator on the census in ten lines, a CSV file by the command line."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    subprocess.run([*install, wheel], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    ended = run("-c", program("README.md"))
    assert ended.returncode == 0, ended.stderr
    statement, accuracy = ended.stdout.strip().splitlines()
    assert "epsilon = 1 " in statement or "epsilon = 0.99" in statement
    assert float(accuracy) > 0.8
    assert "pip install 'dpulr[cli]'" in run("-m", "dpulr", "--version").stderr
    subprocess.run([*install, f"{wheel}[cli,sklearn]"], check=True)
    census = importlib.util.find_spec("xai")
    assert census is not None
    assert census.origin is not None
    shutil.copy(Path(census.origin).parent / "data" / "census.csv", tmp_path)
    shutil.copy(ROOT / "examples" / "adult.toml", tmp_path)
    ended = run("-c", program("docs/tables.md"))
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout.splitlines()[0]) >= 0.83
    table = ["--dataset", "csv:census.csv", "--schema", "adult.toml", "--holdout", "6000", "--evaluation-epsilon", "0.1", "--json"]
    ended = run("-m", "dpulr", "train", *table)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["epsilon"] <= 1
    assert result["test_accuracy"] > 0.82


EXTRAS = (
    "typer",
    "rich",
    "matplotlib",
    "PIL",
    "sklearn",
    "dp_accounting",
    "pyarrow",
    "lightning",
    "mlflow",
    "tensorboard",
    "pandas",
)


@pytest.mark.slow
def test_training_needs_no_extra(tmp_path: Path) -> None:
    """Every package of the extras is made impossible to import."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))\n"
    short = program("README.md").replace("epochs=5", "steps=2")
    more = "\nimport dpulr.runs.report, dpulr.data.tables, dpulr.audit, dpulr.accounting\n"
    ended = subprocess.run(
        [sys.executable, "-c", blocked + short + more], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
