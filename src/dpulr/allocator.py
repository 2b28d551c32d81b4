"""What glibc does with freed memory. Other C libraries are left as they are."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK = 32 * 2**20
_kept = [0]


def keep_freed(most: int) -> None:
    """Have glibc keep up to so many bytes of what one pass has freed for the next.

    By itself it gives blocks of megabytes back to the system, which has to make their pages, and to clear them, for every pass
    again. What the environment says of that (MALLOC_..._) stays.
    """
    chosen = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    mallopt = _of_glibc("mallopt")
    if mallopt is None or chosen or most <= _kept[0]:
        return
    _kept[0] = most
    mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)
    mallopt(_TRIM_THRESHOLD, most)


def give_back() -> None:
    """What the trials of set-up took, and have freed, goes back to the operating system: a step needs less."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
