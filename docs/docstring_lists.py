"""For the reference: docstrings list their settings in two columns, a name and what it does; on the site these become lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ITEM = re.compile(r"([\w\-, ]*\w) {2,}(\S.*)")


class Lists(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = "\n\n".join(map(as_list, obj.docstring.value.split("\n\n")))


def as_list(paragraph: str) -> str:
    """The paragraph, or a list if each of its lines is an item or goes on with one."""
    items: list[str] = []
    for line in paragraph.splitlines():
        if found := _ITEM.fullmatch(line):
            items.append(f"- `{found[1]}`: {re.sub(' {2,}', '; ', found[2])}")
        elif items and line.startswith("  "):
            items[-1] += f" {line.strip()}"
        else:
            return paragraph
    return "\n".join(items)
