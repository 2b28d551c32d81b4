"""Checks a built site as a browser would find it: links and anchors lead somewhere, nothing is fetched from the network, pictures
have texts for people who don't see them, the colours of text have enough contrast (WCAG AA) in light and in dark, and no part of a
formula was taken for markup.

`python docs/check_site.py build/site`; it prints what is wrong and ends with 1.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
ENOUGH = 4.5
SHORT_TAGS = {"a", "b", "br", "dd", "dl", "dt", "em", "g", *(f"h{n}" for n in range(1, 7)), "hr", "li", "mi", "mn", "mo", "ms"}
SHORT_TAGS |= {"ol", "p", "td", "th", "tr", "ul"}
COLOURS = {  # of site.css and of the theme: text on its background
    "light: text": ("#000000de", "#ffffff"),
    "light: quiet text": ("#0000008f", "#ffffff"),
    "light: links": ("#2f3f9f", "#ffffff"),
    "light: header": ("#ffffff", "#4051b5"),
    "light: code": ("#36464e", "#f5f5f5"),
    "light: tabs": ("#ffffffd9", "#4051b5"),
    "light: comments in code": ("#0000008f", "#f5f5f5"),
    "light: numbers in code": ("#d52a2a", "#f5f5f5"),
    "light: functions in code": ("#a846b9", "#f5f5f5"),
    "light: constants in code": ("#6e59d9", "#f5f5f5"),
    "light: keywords in code": ("#3f6ec6", "#f5f5f5"),
    "light: strings in code": ("#1c7d4d", "#f5f5f5"),
    "dark: text": ("#e2e4e9d1", "#1e2129"),
    "dark: quiet text": ("#e2e4e9a8", "#1e2129"),
    "dark: titles of the narrow menu": ("#e2e4e9a8", "#363941"),
    "dark: links": ("#9fb0ff", "#1e2129"),
    "dark: code": ("#d5d8e2d1", "#272a35"),
    "dark: comments in code": ("#e2e4e9a8", "#272a35"),
    "dark: numbers in code": ("#ec7d71", "#272a35"),
    "dark: functions in code": ("#c973d9", "#272a35"),
    "dark: constants in code": ("#9f90e8", "#272a35"),
    "dark: keywords in code": ("#6791e0", "#272a35"),
    "dark: strings in code": ("#2fb170", "#272a35"),
}


class Page(HTMLParser):
    """What a page links to, loads and shows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.silent: list[str] = []
        self.language = ""
        self.odd: list[str] = []
        self._emphasis = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.update(values[name] for name in ("id", "name") if values.get(name))
        if tag == "html":
            self.language = values.get("lang", "")
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in LOADED and values.get(LOADED[tag]) and values.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(values[LOADED[tag]])
        if tag == "img" and not values.get("alt", "").strip():
            self.silent.append(values.get("src", "?"))
        if len(tag) < 3 and tag not in SHORT_TAGS:
            self.odd.append(f"<{tag} ...>")
        self._emphasis = tag == "em"

    def handle_data(self, data: str) -> None:
        if self._emphasis and not data[:1].isalnum():
            self.odd.append(data.split("\n")[0])
        self._emphasis = False


def main(site: Path) -> int:
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    wrong = [f"contrast of {name} is {value:.2f}" for name, value in contrasts().items() if value < ENOUGH]
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        wrong += [f"{name}: a picture without a text: {picture}" for picture in page.silent]
        wrong += [f"{name}: loads {address}" for address in page.loads if urlsplit(address).scheme in ("http", "https")]
        wrong += [f"{name}: part of a formula was taken for markup: {text}" for text in page.odd]
        wrong += [] if page.language else [f"{name}: does not say its language"]
        if name.name != "404.html":
            wrong += [f"{name}: {problem}" for link in page.links if (problem := broken(link, path, pages))]
    for sheet in site.rglob("*.css"):
        for address in re.findall(r"url\(['\"]?(https?:[^)'\"]+)", sheet.read_text(encoding="utf-8")):
            wrong.append(f"{sheet.name}: loads {address}")
    print("\n".join(wrong) or f"{len(pages)} pages: links, pictures, contrast and independence of the network are fine.")
    return bool(wrong)


def broken(link: str, path: Path, pages: dict[Path, Page]) -> str:
    parts = urlsplit(link)
    if parts.scheme or link.startswith("//"):
        return ""
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return f"{link} leads nowhere"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors and not anchor.startswith("__"):
        return f"{link}: there is no such place on that page"
    return ""


def contrasts() -> dict[str, float]:
    return {name: contrast(text, back) for name, (text, back) in COLOURS.items()}


def contrast(text: str, back: str) -> float:
    under = _parts(back)[:3]
    *over, alpha = _parts(text)
    mixed = [alpha * o + (1 - alpha) * u for o, u in zip(over, under, strict=True)]
    bright, dark = sorted((_luminance(mixed), _luminance(under)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _parts(colour: str) -> list[float]:
    digits = colour.removeprefix("#").ljust(8, "f")
    return [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4, 6)]


def _luminance(parts: list[float]) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
