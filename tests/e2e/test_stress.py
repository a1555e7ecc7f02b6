"""64 clients at once, each with 20 requests, some of which hang up: nothing fails unasked, no block is lost."""

import asyncio
import contextlib
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

CLIENTS = 64
REQUESTS = 20


async def one_request(client: httpx.AsyncClient, rng: random.Random) -> str:
    """Streams a completion; hangs up after a random number of chunks in a third of the cases."""
    body = {
        "model": "smollm2",
        "prompt": " ".join(rng.choice(["red", "stone", "river", "count", "seven"]) for _ in range(rng.randint(1, 60))),
        "max_tokens": rng.randint(1, 12),
        "stream": True,
        "temperature": rng.choice([0, 0.8]),
        "ignore_eos": True,
    }
    patience = rng.randint(0, 5) if rng.random() < 1 / 3 else None
    seen = 0
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            return f"HTTP {reply.status_code}: {(await reply.aread()).decode()}"
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                return "done"
            if '"error"' in line:
                return line
            seen += line.startswith("data:")
            if patience is not None and seen > patience:
                return "cancelled"
    return "the stream ended without [DONE]"


async def one_client(url: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=240) as client:
        return [await one_request(client, rng) for _ in range(REQUESTS)]


async def metric(client: httpx.AsyncClient, name: str) -> float:
    text = (await client.get("/metrics")).text
    found = re.search(rf"^castline:{name}(?:{{[^}}]*}})? ([\d.e+-]+)$", text, re.M)
    assert found, f"no {name} in\n{text}"
    return float(found.group(1))


async def settle(url: str) -> None:
    """Waits until nothing runs and no block is held; the server's own gauges say when."""
    async with httpx.AsyncClient(base_url=url) as client:
        async with asyncio.timeout(60):
            while await metric(client, "num_requests_running") or await metric(client, "num_requests_waiting"):
                await asyncio.sleep(0.05)
        assert await metric(client, "kv_cache_usage_perc") == 0


def test_many_clients_with_cancels(
    default_engine: Path, serve: Callable[..., contextlib.AbstractContextManager[Any]]
) -> None:
    async def load(url: str) -> list[str]:
        answers = await asyncio.gather(*(one_client(url, seed) for seed in range(CLIENTS)))
        await settle(url)
        return [answer for client in answers for answer in client]

    with serve(default_engine) as running:
        outcomes = asyncio.run(load(running.http_url))
    assert len(outcomes) == CLIENTS * REQUESTS
    assert set(outcomes) <= {"done", "cancelled"}, {o for o in outcomes if o not in ("done", "cancelled")}
    assert outcomes.count("cancelled") > 100
