"""The event loop that serves: uvloop where there is one, else asyncio's own, which does the same more slowly."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def run(main: Coroutine[None, None, T]) -> T:
    """As asyncio.run."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
