"""What `mkdocs build` does beside its own: new pages go into the navigation, links out of docs/ become names, formulas render.

Formulas are written as ```math blocks in TeX, as forges render them; here they become MathML, which browsers draw without a script.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
LATER = {"Guides": {"beyond-backprop.md": "Beyond backpropagation", "language-models.md": "Language models", "scale.md": "Scale"}}
LATER["Guides"] |= {"tune.md": "Tuning under the guarantee", "features.md": "Public features"}


def on_config(config: Any) -> Any:
    """Pages of other authors, once they are there."""
    named = re.findall(r"[\w/-]+\.md", str(config["nav"]))
    for section in config["nav"]:
        for title, pages in section.items():
            for name, words in LATER.get(title, {}).items():
                if (DOCS / name).exists() and name not in named:
                    pages.append({words: name})
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A link to a file outside of docs/ has no page to lead to: its name stays."""
    without = re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?!docs/)[^)]*\)", r"\1", markdown)
    return re.sub(r"```math\n(.*?)```", _formula, without, flags=re.DOTALL)


def _formula(found: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    return f'<div class="formula">{convert(" ".join(found.group(1).split()), display="block")}</div>'
