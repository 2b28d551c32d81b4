"""The numbers of the benchmarks: reproduction/results/bench.json."""

from __future__ import annotations

import json
from typing import Any

from reproduction import RESULTS

FILE = RESULTS / "bench.json"


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def update(**parts: Any) -> None:
    """Put new numbers in place of the old ones; the others stay."""
    FILE.write_text(json.dumps(read() | parts, indent=1) + "\n")
