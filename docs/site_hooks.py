"""What `mkdocs build` does beside its own: examples are on the site, links to other files outside of docs/ become names, formulas
render, numbers in tables stay on one line, printed sentences wrap, and the settings of a run are listed.

Formulas are written as ```math blocks in TeX, as forges render them; here they become MathML, which browsers draw without a script.
Those inside of sentences are plain text, `sigma_0^2 <= e^epsilon`; here they get their letters, signs, and places above and below.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
EXAMPLES = DOCS.parent / "examples"
MATHEMATICAL = ("theory.md", "errata.md")
LETTERS = {"alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν"}
LETTERS |= {"pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ", "chi": "χ", "psi": "ψ", "omega": "ω"}
LETTERS |= {"Phi": "Φ", "Gamma": "Γ", "sqrt": "√"}
_PRIME = re.compile(r"<msup>(<(mi|mn|mtext)[^>]*>[^<]*</\2>|<mrow>(?:<mi[^>]*>[^<]*</mi>)+</mrow>)<mi>&#x0?2032;</mi></msup>")
SIGNS = {"&lt;=": "≤", "&gt;=": "≥", "-&gt;": "→", "+-": "±", "sum_": "∑_", "prod_": "∏_"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    depth = page.url.count("/")
    place = f"{'../' * depth}examples"
    markdown = re.sub(r"\[([^\]]+)\]\((?:\.\./)+examples/([\w.]+)\)", rf'<a href="{place}/\2">\1</a>', markdown)
    markdown = re.sub(r"`examples/(\w+\.\w+)`", rf'<a href="{place}/\1"><code>examples/\1</code></a>', markdown)
    outside = rf"\[([^\]]+)\]\((?:\.\./){{{depth + 1},}}(?!docs/)[^)]*\)"  # it has no page to lead to: its name stays
    markdown = re.sub(outside, r"\1", markdown)
    if depth:
        printed = re.compile(r"^```text\n(.*?)^```", re.DOTALL | re.MULTILINE)  # by tutorials: sentences, broken for a forge
        markdown = printed.sub(lambda found: "```{ .text .wrap }\n" + re.sub(r"\n {4}(?=\S)", " ", found[1]) + "```", markdown)
    if "<!-- settings -->" in markdown:
        markdown = markdown.replace("<!-- settings -->", _settings())
    return re.sub(r"```math\n(.*?)```", _formula, markdown, flags=re.DOTALL)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    if page.file.src_uri in MATHEMATICAL:
        html = _typeset(html)
    html = re.sub(r"<td>(?=[\d.,%e+\-]+( ± [\d.]+)?( \(\d+\))?</td>)", '<td class="number">', html)
    return re.sub(r"<td>(?=[^<]{25,}</td>)", '<td class="sentence">', html)


def on_post_build(config: Any) -> None:
    """The examples, and the files that they and the tutorials open. No page for addresses that are wrong: where the site will lie
    is not known, and such a page finds its style by an address of its own."""
    (Path(config["site_dir"]) / "404.html").unlink(missing_ok=True)
    target = Path(config["site_dir"]) / "examples"
    target.mkdir(exist_ok=True)
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.toml")]:
        shutil.copy(path, target)


def _settings() -> str:
    from dpulr.runs.settings import Settings

    rows = [(f.name, "" if f.default is MISSING else f.default, f.metadata["help"]) for f in fields(Settings)]
    return "\n".join(["| setting | default | what it is |", "|---|---|---|", *(f"| `{n}` | {d} | {text} |" for n, d, text in rows)])


def _typeset(html: str) -> str:
    """The sentences of a page, but no code and no formula that is typeset already."""
    parts, inside = re.split(r"(<[^>]*>)", html), 0
    for i, part in enumerate(parts):
        if tag := re.match(r"<(/?)(code|pre|math|script)\b", part):
            inside += -1 if tag[1] else 1
        elif not inside and not part.startswith("<"):
            parts[i] = _places(part)
    return "".join(parts)


def _places(text: str) -> str:
    """Letters by their names, signs, and what stands above (^) or below (_), in braces, in brackets, or a word."""
    text = re.sub("|".join(map(re.escape, SIGNS)), lambda found: SIGNS[found[0]], text)
    text = re.sub(rf"(?<![A-Za-z\-])({'|'.join(LETTERS)})(?![A-Za-z]|-[a-z])", lambda found: LETTERS[found[1]], text)
    text = re.sub(r"(?<=[α-ωΑ-Ω])(?=\d)", "_", text)
    word, braces = r"[-+]?[A-Za-z0-9α-ωΦΓ*']+(?:\.\d+)?(?:_[A-Za-z0-9α-ω]+)?", r"\{([^{}]*)\}"
    raised = re.compile(rf"(?<=[\w)\]|}}'*])\^(?:{braces}|(\([^()]*(?:\([^()]*\)[^()]*)*\))|({word}))")
    text = raised.sub(lambda found: f"<sup>{_places(next(filter(None, found.groups()), ''))}</sup>", text)
    lowered = re.compile(rf"(?<=[A-Za-zα-ωΦΓ∑∏'~*|)])_(?:{braces}|([A-Za-z0-9α-ω+]+))")
    return lowered.sub(lambda found: f"<sub>{_places(found[1] or found[2] or '')}</sub>", text)


def _formula(found: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    typeset = convert(" ".join(found.group(1).split()), display="block")
    typeset = _PRIME.sub(r"<mrow>\1<mo>&#x2032;</mo></mrow>", typeset)  # its glyph is high already
    return f'<div class="formula">{typeset}</div>'
