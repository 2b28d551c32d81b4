"""The small job of tests/runs serves here too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))

_spec = importlib.util.spec_from_file_location("runs_conftest", Path(__file__).parents[1] / "runs" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
run_cli, finished = _module.run_cli, _module.finished
