"""What `mkdocs build` does beside its own: examples are on the site, links to other files outside of docs/ become names, formulas
render, numbers in tables stay on one line, and the settings of a run are listed.

Formulas are written as ```math blocks in TeX, as forges render them; here they become MathML, which browsers draw without a script.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
EXAMPLES = DOCS.parent / "examples"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    depth = page.url.count("/")
    place = f"{'../' * depth}examples"
    markdown = re.sub(r"\[([^\]]+)\]\((?:\.\./)+examples/([\w.]+)\)", rf'<a href="{place}/\2">\1</a>', markdown)
    markdown = re.sub(r"`examples/(\w+\.\w+)`", rf'<a href="{place}/\1"><code>examples/\1</code></a>', markdown)
    outside = rf"\[([^\]]+)\]\((?:\.\./){{{depth + 1},}}(?!docs/)[^)]*\)"  # it has no page to lead to: its name stays
    markdown = re.sub(outside, r"\1", markdown)
    if depth:
        markdown = markdown.replace("```text\n", "```{ .text .wrap }\n")  # what tutorials print: sentences
    if "<!-- settings -->" in markdown:
        markdown = markdown.replace("<!-- settings -->", _settings())
    return re.sub(r"```math\n(.*?)```", _formula, markdown, flags=re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    html = re.sub(r"<td>(?=[\d.,%e+\-]+( ± [\d.]+)?( \(\d+\))?</td>)", '<td class="number">', html)
    return re.sub(r"<td>(?=[^<]{25,}</td>)", '<td class="sentence">', html)


def on_post_build(config: Any) -> None:
    """The examples, and the files that they and the tutorials open."""
    target = Path(config["site_dir"]) / "examples"
    target.mkdir(exist_ok=True)
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.toml")]:
        shutil.copy(path, target)


def _settings() -> str:
    from dpulr.runs.settings import Settings

    rows = [(f.name, "" if f.default is MISSING else f.default, f.metadata["help"]) for f in fields(Settings)]
    return "\n".join(["| setting | default | what it is |", "|---|---|---|", *(f"| `{n}` | {d} | {text} |" for n, d, text in rows)])


def _formula(found: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    return f'<div class="formula">{convert(" ".join(found.group(1).split()), display="block")}</div>'
