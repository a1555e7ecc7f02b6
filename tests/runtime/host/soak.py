"""Thousands of requests, and what they leave behind: a program of its own, whose memory no other test has touched.

    python tests/runtime/host/soak.py [--leak]

Prints a line of JSON for each round of requests: how many there were, the memory blocks that Python holds after it, and
the bytes that the process has in memory. ``--leak`` keeps one output of every request, to show that a leak is seen.
"""

import asyncio
import gc
import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import psutil
from conftest import ScriptedEngine, write_tokenizer  # beside this file, which is run as a script

from castline.runtime.client import Output
from castline.runtime.events import FinishReason
from castline.runtime.sampling_params import SamplingParams

CLIENTS, ROUNDS = 16, (125, 100, 200, 200)
"""The first rounds fill every cache and every pool of memory."""


async def soak(made: ScriptedEngine, leaked: list[Output] | None) -> None:
    text = made.text("abc", 8)
    params = SamplingParams(temperature=0, max_tokens=20, stop=(text[2:5], "never"), stop_token_ids=(1,))
    engine = await made.start()

    async def client(count: int) -> None:
        for _ in range(count):
            outputs = [output async for output in engine.generate("abc", params, request_id="r")]
            assert outputs[-1].finish_reason is FinishReason.STOP
            if leaked is not None:
                leaked.append(outputs[-1])

    for count in ROUNDS:
        await asyncio.gather(*(client(count) for _ in range(CLIENTS)))
        await made.idle(engine)
        gc.collect()
        after = {"blocks": sys.getallocatedblocks(), "resident": psutil.Process().memory_info().rss}
        print(json.dumps({"requests": count * CLIENTS, **after}), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory))
        with closing(ScriptedEngine(Path(directory))) as made:
            asyncio.run(soak(made, [] if "--leak" in sys.argv else None))
