"""What the documentation quotes: the paper's evaluation, certified methods beside DP-SGD, the audit's sweep. Run from a clone:

python -m reproduction --list
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "reproduction" / "results"
DOCS = ROOT / "docs"
