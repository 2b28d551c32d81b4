"""Reports: what they say, that they need nothing from outside, and how they look in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpulr import accounting
from dpulr.accounting.disk_ledger import DiskLedger, ledger_digest
from dpulr.runs.report import charts
from tests.support.small_cli import SMALL, Ended

Cli = Callable[..., Ended]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: the look of reports is not checked")
VOID = {"meta", "circle", "line", "rect", "polyline"}


class Checked(HTMLParser):
    """Fails on unbalanced tags and collects what refers to something outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def checked(text: str) -> Checked:
    parser = Checked()
    parser.feed(text)
    assert parser.open == []
    assert parser.references == []
    assert "script" not in parser.tags
    assert not re.search(r"https?:|url\(|@import", text)
    return parser


def test_a_report_says_it_all_and_needs_nothing(finished: Path, run_cli: Cli) -> None:
    assert run_cli("report", finished).code == 0
    text = (finished / "report.html").read_text()
    parser = checked(text)
    assert parser.tags.count("svg") == 6
    ledger = DiskLedger.open(finished, ledger_digest((finished / "config.json").read_bytes()))
    result = json.loads((finished / "result.json").read_text())
    assert result["planned_epsilon"] == result["epsilon"]
    assert "epsilon of all planned steps" not in text
    for promised in (
        str(accounting.privacy_spent(ledger.charges, 1e-5, public_size=result["public_size"], schema=result["schema"])),
        *(
            "Held-out accuracy",
            "Held-out loss",
            "Expected calibration error",
            "Brier score",
            "Epsilon spent",
            "Privacy profile",
            "Where the time went",
        ),
        *("tests.support.small_job:data", "torch"),
    ):
        assert promised in unescape(text)
    assert "training loss of the batches" not in text


def test_epsilon_comes_from_the_ledger(finished: Path, run_cli: Cli) -> None:
    """A killed run has no result, and an edited result is not believed."""
    (finished / "result.json").write_text('{"epsilon": 0.001, "steps": 3, "statement": "all is well"}')
    assert run_cli("report", finished).code == 0
    text = (finished / "report.html").read_text()
    assert "0.001" not in text
    assert "after 12 steps" in text


def test_several_runs_are_compared(finished: Path, tmp_path: Path, run_cli: Cli) -> None:
    other = tmp_path / "other"
    assert run_cli("train", *SMALL, "--steps", 6, "--out", other, "--show-unprotected").code == 0
    out = tmp_path / "both.html"
    assert run_cli("report", finished, other, "--out", out).code == 0
    text = out.read_text()
    checked(text)
    assert text.count('class="guarantee') == 2
    assert "Settings that differ" in text
    assert "<td>steps</td><td>12</td><td>6</td>" in text
    assert run_cli("report", other).code == 0
    assert "Not covered by the guarantee" in (other / "report.html").read_text()


def test_no_guarantee_is_said_so(tmp_path: Path, run_cli: Cli) -> None:
    folder = tmp_path / "run"
    assert run_cli("train", *SMALL, "--steps", 4, "--sampling", "shuffle", "--allow-uncertified", "--out", folder).code == 0
    assert run_cli("report", folder).code == 0
    text = (folder / "report.html").read_text()
    assert 'class="guarantee bad"' in text
    assert "No privacy guarantee" in text
    assert "Privacy profile: nothing to show yet" in text


def test_names_cannot_inject(finished: Path, run_cli: Cli) -> None:
    folder = finished.with_name("<script>alert(1)<")
    finished.rename(folder)
    assert run_cli("report", folder).code == 0
    checked((folder / "report.html").read_text())


def test_ticks_are_round_and_inside() -> None:
    for low, high in ((0, 1), (0.113, 0.97), (-3, 12_345), (1e-7, 3e-7)):
        ticks = charts.Axis("").ticks(low, high)
        assert 2 <= len(ticks) <= 8
        assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    assert charts.Axis("", whole=True).ticks(0, 3) == [0, 1, 2, 3]


def test_a_chart_of_one_point_stays_near_it() -> None:
    shown = str(charts.line_chart("accuracy", [charts.Series("a", [(3, 0.9)])], charts.Axis("step", whole=True), charts.Axis("")))
    ticks = [float(text) for text in re.findall(r'y-tick"[^>]*>([^<]+)<', shown)]
    assert 0.8 <= min(ticks) < 0.9 < max(ticks) <= 1


# --- in a browser -------------------------------------------------------------------------------------------------------
def screenshot(page: Path, width: int, height: int, *, dark: bool = False) -> np.ndarray:
    """Pixels (height, width, 3) of the page as chromium shows it."""
    picture = page.with_suffix(f".{width}{dark}.png")
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
        *(
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            f"--user-data-dir={page.parent / f'profile{width}{dark}'}",
        ),
        *(
            f"--window-size={width},{height}",
            f"--screenshot={picture}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        ),
        page.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True)
    with Image.open(picture) as image:
        return np.asarray(image.convert("RGB")).astype(int)


@pytest.mark.slow
@needs_browser
def test_light_and_dark_wide_and_narrow(finished: Path, run_cli: Cli) -> None:
    assert run_cli("report", finished).code == 0
    page = finished / "report.html"
    light, dark = screenshot(page, 1200, 1300), screenshot(page, 1200, 1300, dark=True)
    assert light[5, 5].min() > 225
    assert dark[5, 5].max() < 40
    for pixels in (light, dark):
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50  # something is drawn
    blue = (abs(light - [0x25, 0x63, 0xC9]).max(-1) < 12).any(0)  # the lines of the charts
    assert blue[:600].any()
    assert blue[600:].any()  # two columns when wide
    narrow = screenshot(page, 500, 3600)
    columns = abs(narrow - narrow[5, 5]).max(-1).max(0) > 8
    assert not columns[-8:].any()  # nothing reaches over the right edge
    assert not columns[:8].any()
