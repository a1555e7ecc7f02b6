"""Resident memory of a server that has answered one request."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytestmark = pytest.mark.slow

LIMIT_MIB = 400


def test_resident_memory_follows_use(
    default_engine: Path, serve: Callable[..., contextlib.AbstractContextManager[Any]]
) -> None:
    """Weights held twice, a KV pool taken whole, or a build library loaded to serve, shows here.

    Pages that the two processes share count once.
    """
    with serve(default_engine) as server:
        body = {"model": "smollm2", "prompt": "one two three " * 100, "max_tokens": 8}
        assert httpx.post(f"{server.http_url}/v1/completions", json=body, timeout=60).status_code == 200
        parent = psutil.Process(server.process.pid)
        resident = sum(process.memory_full_info().pss for process in (parent, *parent.children(recursive=True)))
    assert resident / 2**20 < LIMIT_MIB
