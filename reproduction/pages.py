"""Tables in Markdown, and the marked parts of the pages in docs/ that are filled from results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *rows])


def filled(text: str, parts: dict[str, str]) -> str:
    """The text with each part between its `<!-- name -->` and the next `<!-- end -->`."""
    for name, part in parts.items():
        mark = f"<!-- {name} -->\n"
        if text.count(mark) != 1:
            raise ValueError(f"there must be one place for {name!r}, {mark.strip()}; there are {text.count(mark)}.")
        before, _, rest = text.partition(mark)
        text = f"{before}{mark}{part}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def fill(page: Path, parts: dict[str, str]) -> bool:
    """Fill a page; whether that changed it."""
    old = page.read_text()
    new = filled(old, parts)
    page.write_text(new)
    return new != old


def differs(page: Path, parts: dict[str, str]) -> list[str]:
    """The names of the parts that the page has otherwise, and of marked parts that nobody fills."""
    text = page.read_text()
    wrong = [name for name, part in parts.items() if filled(text, {name: part}) != text]
    marks = [line[5:-4] for line in text.splitlines() if line.startswith("<!-- ") and line.endswith(" -->")]
    return wrong + [f"{name} (nobody fills it)" for name in marks if name != "end" and name not in parts]
