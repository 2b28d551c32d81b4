"""Makes the pictures of docs/cli.md: trains the main job, keeps its live view on the way, and takes pictures of its report.

`python docs/images/make.py` (needs chromium; about two minutes).
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from dpulr.cli.progress import LiveView
from dpulr.runs import Settings, report, start

HERE = Path(__file__).resolve().parent
WIDTH = 100


class KeptView(LiveView):
    """A live view that keeps what it shows after 60% of the steps."""

    kept = ""

    def metrics(self, values: Mapping[str, Any]) -> None:
        super().metrics(values)
        if not self.kept and values["step"] >= 0.6 * self.about["planned_steps"]:
            paper = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True)
            paper.print(self.picture())
            self.kept = paper.export_svg(title="dpulr train")


def main() -> None:
    browser = shutil.which("chromium")
    assert browser is not None, "chromium is needed"
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        folder = Path("runs") / "mnist-main-job"
        view = KeptView(Console(width=WIDTH, file=io.StringIO(), force_terminal=True))
        with view:
            start(Settings(), folder, view)
        drawn = Path(scratch) / "live.svg"
        drawn.write_text(view.kept)
        page = report.write([folder]).resolve()
        shoot(browser, drawn, HERE / "live.png", (1240, 420), crop=True)
        shoot(browser, page, HERE / "report-light.png", (1160, 1330))
        shoot(browser, page, HERE / "report-dark.png", (1160, 1330), dark=True)
        shoot(browser, page, HERE / "report-narrow.png", (500, 1330))


def shoot(browser: str, page: Path, out: Path, size: tuple[int, int], *, dark: bool = False, crop: bool = False) -> None:
    with tempfile.TemporaryDirectory() as profile:
        command = [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
            *("--disable-component-update", "--disable-sync", "--hide-scrollbars", f"--user-data-dir={profile}"),
            *(f"--window-size={size[0]},{size[1]}", f"--blink-settings=preferredColorScheme={0 if dark else 1}"),
            *(f"--screenshot={out}", page.as_uri()),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(out) as picture:
        image = picture.convert("RGB")
    if crop:  # the window without the white around it
        box = Image.eval(image.convert("L"), lambda value: 255 - value).getbbox()
        image = image.crop(box)
    image.quantize(160).save(out, optimize=True)


if __name__ == "__main__":
    main()
