"""Downloading a file: what is there already is kept, so a broken download goes on where it stopped."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from dpulr.errors import DataError

Progress = Callable[[str, int, int], None]  # what is going on, how much is done, of how much (0: unknown)
_BLOCK = 1 << 18
_TRIES = 4


def download(url: str, path: Path, progress: Progress) -> Path:
    """Fetch `url` into `path` by way of `path`.part, which survives a break and is continued, now or next time."""
    part = path.with_name(path.name + ".part")
    problem: Exception | None = None
    for _ in range(_TRIES):
        try:
            if _more(url, part, progress):
                part.replace(path)
                return path
        except urllib.error.HTTPError as refused:
            if refused.code == 416:  # nothing lies behind what we have: it is another file, or whole
                part.unlink(missing_ok=True)
            elif refused.code < 500:
                raise DataError(f"{url} can't be downloaded: {refused.code} {refused.reason}.") from refused
            problem = refused
        except (OSError, ValueError) as broken:
            problem = broken
    raise DataError(f"{url} could not be downloaded ({problem or 'it broke off'}). What came is kept; try again to go on.")


def _more(url: str, part: Path, progress: Progress) -> bool:
    """Download what is missing. True if the file is whole."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=30) as answer:
        if answer.status != 206:  # the server sends it from the beginning
            have = 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else 0
        with part.open("ab" if have else "wb") as file:
            while block := answer.read(_BLOCK):
                file.write(block)
                have += len(block)
                progress(url.rsplit("/", 1)[-1], have, total)
    return total == 0 or have == total
