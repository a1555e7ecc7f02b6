"""Many requests that end in every way: the engine stays whole and nothing of them stays behind."""

import asyncio
import gc
import random
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from castline.runtime.async_engine import AsyncEngine
from castline.runtime.events import FinishReason
from castline.runtime.sampling_params import SamplingParams

Scripted = Callable[..., Any]


async def settle(made: Any, engine: AsyncEngine) -> None:
    async def poll() -> None:
        while made.core.has_work or engine.stats().kv_blocks_used or engine.stats().num_running:
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), 60)
    made.core.scheduler.check()
    assert len(engine._live) == len(engine._processor) == len(made.core._sampler) == 0
    assert not made.core.scheduler.groups
    assert not made.core._deadlines


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
        await settle(made, engine)
        assert engine.stats().preemptions > 0, "the pool was meant to be too small"

    asyncio.run(asyncio.wait_for(scenario(), 120))


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing(scripted: Scripted) -> None:
    """C18: with stop lists; memory is flat after a warm-up, and no state of a request stays on either side."""
    made = scripted()
    text = made.text("abc", 8)
    params = SamplingParams(temperature=0, max_tokens=20, stop=(text[2:5], "never"), stop_token_ids=(1,))

    async def scenario() -> None:
        engine = await made.start()

        async def client(count: int) -> None:
            for _ in range(count):
                outputs = [o async for o in engine.generate("abc", params, request_id="r")]
                assert outputs[-1].finish_reason is FinishReason.STOP

        process = psutil.Process()
        await asyncio.gather(*(client(125) for _ in range(16)))
        gc.collect()
        before = process.memory_info().rss
        await asyncio.gather(*(client(500) for _ in range(16)))
        gc.collect()
        await settle(made, engine)
        assert process.memory_info().rss - before < 4 << 20

    asyncio.run(asyncio.wait_for(scenario(), 240))
