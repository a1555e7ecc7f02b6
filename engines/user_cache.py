"""Where files are kept that only save time: another run makes them again."""

import os
from pathlib import Path


def user_cache() -> Path | None:
    """``$XDG_CACHE_HOME/castline``, or ``~/.cache/castline``; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "castline"
    try:
        return Path.home() / ".cache" / "castline"
    except RuntimeError:  # a container's user whom nobody knows
        return None
