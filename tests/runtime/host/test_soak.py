"""Many requests that end in every way: the engine stays whole and nothing of them stays behind."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from castline.runtime.async_engine import AsyncEngine
from castline.runtime.sampling_params import SamplingParams

Scripted = Callable[..., Any]
SOAK = Path(__file__).with_name("soak.py")
BLOCKS, BYTES = 0.1, 256
"""Growth that passes for flat, for each request: one object left behind is a block at least."""


def test_aborts_at_random_moments(scripted: Scripted) -> None:
    """C19: streams with logprobs, n and stop strings, dropped after 0 to 20 outputs, preempted on the way: each request
    has one outcome, every whole one the text it would have had alone, and every block comes back."""
    made = scripted(num_blocks=24, max_model_len=128)
    rng = random.Random(19)

    async def client(engine: AsyncEngine, number: int) -> None:
        prompt = chr(97 + number % 26) * rng.randint(1, 60)
        params = SamplingParams(
            temperature=0,
            max_tokens=rng.randint(1, 60),
            n=rng.choice((1, 1, 3)),
            logprobs=rng.choice((None, 0, 2)),
            stop=rng.choice(((), ("qz", "zzz"))),
        )
        leave_after = rng.choice((None, rng.randint(0, 20)))
        texts, finished = [""] * params.n, [0] * params.n
        stream = engine.generate(prompt, params, request_id="same for all")
        taken = 0
        async for output in stream:
            assert finished[output.index] == 0, "an output after the end"
            texts[output.index] += output.text
            finished[output.index] += output.finish_reason is not None
            if params.logprobs is not None:
                assert len(output.logprobs or ()) == len(output.token_ids)
            taken += 1
            if leave_after is not None and taken > leave_after:
                await stream.aclose()  # type: ignore[attr-defined]
                return
        assert finished == [1] * params.n
        if not params.stop:
            assert texts == [made.text(prompt, params.max_tokens)] * params.n

    async def scenario() -> None:
        engine = await made.start()
        limit = asyncio.Semaphore(32)

        async def limited(number: int) -> None:
            async with limit:
                task = asyncio.create_task(client(engine, number))
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.random() * 0.01)
                    task.cancel()
                await asyncio.gather(task, return_exceptions=task.cancelling() > 0)

        await asyncio.gather(*(limited(i) for i in range(600)))
        await made.idle(engine)
        assert engine.stats().preemptions > 0, "the pool was meant to be too small"

    asyncio.run(asyncio.wait_for(scenario(), 120))


def rounds(*options: str) -> list[dict[str, int]]:
    """What `soak.py` measured after each round of requests."""
    command = [sys.executable, str(SOAK), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240)
    return [json.loads(line) for line in done.stdout.splitlines()]


def growth(measured: list[dict[str, int]], what: str) -> float:
    """Of *what*, for each request, in that of the last two rounds where it was less: a leak shows in every round, and
    a pool that an allocator makes larger in one."""
    *_, first, second, third = measured
    return min((after[what] - before[what]) / after["requests"] for before, after in ((first, second), (second, third)))


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing() -> None:
    """C18: with stop lists; memory is flat after a warm-up, and no state of a request stays on either side."""
    measured = rounds()
    assert sum(done["requests"] for done in measured) == 10_000
    assert growth(measured, "blocks") < BLOCKS
    assert growth(measured, "resident") < BYTES


@pytest.mark.slow
def test_one_output_kept_of_every_request_is_seen() -> None:
    """The limit of the test above must not be so wide that the smallest leak fits in."""
    assert growth(rounds("--leak"), "blocks") > 10 * BLOCKS
