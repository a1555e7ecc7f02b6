"""A process whose heap lies in huge pages (`castline.runtime.huge_pages`): whether it can be had, and how to start it.

Imports nothing heavy: a start begins here.
"""

import os
import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from castline.engines.pages import HUGE_PAGE

SETTINGS: Final = Path("/sys/kernel/mm/transparent_hugepage")

_TUNABLES: Final = "GLIBC_TUNABLES"
_MALLOC: Final = {
    "glibc.malloc.hugetlb=1": None,
    "glibc.malloc.mmap_threshold=1073741824": "MALLOC_MMAP_THRESHOLD_",
    "glibc.malloc.trim_threshold=67108864": "MALLOC_TRIM_THRESHOLD_",
}
"""The tunables of a heap in huge pages, and the variables that said the same before tunables did."""
_FIRST_GLIBC: Final = (2, 35)
"""Older ones refuse the first two, and do worse with the third alone."""


def available(settings: Path = SETTINGS) -> bool:
    """Whether the system gives huge pages of 2 MiB to those who ask for them."""
    try:
        if "[never]" in (settings / "enabled").read_text():
            return False
        return int((settings / "hpage_pmd_size").read_text()) == HUGE_PAGE
    except (OSError, ValueError):
        return False


def wanted(mode: str, target: str) -> bool:
    """Whether what an engine for *target* reads is to lie in them: *mode* as in `LoadOptions.huge_pages`."""
    return mode == "auto" and target == "cpu" and available()


def environment(outer: Mapping[str, str], libc: str | None = None) -> dict[str, str]:
    """*outer*, for a process whose heap is to lie in huge pages; what *outer* sets itself prevails.

    All of it is one stretch: large allocations join the others instead of having pages of their own, whose ends no huge
    page covers, and so do Python's objects. *libc* like ``glibc 2.36``; None: this process's. Only glibc is told.
    """
    version = re.match(r"glibc (\d+)\.(\d+)", _libc() if libc is None else libc)
    if version is None or (int(version[1]), int(version[2])) < _FIRST_GLIBC:
        return dict(outer)
    tunables = [tunable for tunable, variable in _MALLOC.items() if variable is None or variable not in outer]
    ours = {_TUNABLES: ":".join(filter(None, (*tunables, outer.get(_TUNABLES))))}
    if not outer.get("PYTHONDEVMODE") and not sysconfig.get_config_var("Py_GIL_DISABLED"):  # these need their own
        ours["PYTHONMALLOC"] = outer.get("PYTHONMALLOC", "malloc")
    return {**outer, **ours}


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return ""
