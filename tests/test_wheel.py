"""The wheel, built from the source tree, installed into an empty environment, runs the README's program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def readme_program() -> str:
    match = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert match is not None
    return match.group(1)


@pytest.mark.slow
def test_wheel_runs_the_readme_program_in_an_empty_environment(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel], check=True)
    program = tmp_path / "program.py"
    program.write_text(readme_program())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # other tests may be running: threads that wait would slow both
    result = subprocess.run([python, program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    statement, accuracy = result.stdout.strip().splitlines()
    assert "epsilon = 1 " in statement or "epsilon = 0.99" in statement
    assert float(accuracy) > 0.8
