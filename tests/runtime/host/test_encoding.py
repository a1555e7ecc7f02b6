"""Long prompts through the serving side: refused unencoded where they cannot fit, and in nobody's way."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from castline.engines.errors import EngineError, ErrorCode, RequestError
from castline.runtime.async_engine import AsyncEngine
from castline.runtime.encoding import LONG_CHARS, LONGEST_CHARS
from castline.runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
Scripted = Callable[..., Any]
LONGEST_TOKEN = len("<assistant>")


async def text_of(engine: AsyncEngine, prompt: str) -> str:
    return "".join([output.text async for output in engine.generate(prompt, GREEDY, request_id="r")])


class HeldTokenizer:
    """Stands before a tokenizer's ``encode``: notes what comes, and holds the longest texts until it is released."""

    def __init__(self, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.encoded: list[str] = []
        self.released = threading.Event()
        self._encode = tokenizer.encode
        monkeypatch.setattr(tokenizer, "encode", self.encode)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
        self.encoded.append(text)
        if len(text) > LONGEST_CHARS:
            assert self.released.wait(60)
        return self._encode(text, add_special_tokens=add_special_tokens)


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_text_that_cannot_fit_is_not_encoded(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """31 MB of text took gigabytes and half a minute of a core, only to be refused."""
    made = scripted()
    held = HeldTokenizer(made.tokenizer, monkeypatch)

    async def scenario() -> None:
        engine = await made.start()
        longest = made.limits.max_model_len * LONGEST_TOKEN
        for prompt in ("a" * (LONG_CHARS + longest), "é" * (LONG_CHARS + longest // 2), "a" * 10_000_000):
            with pytest.raises(RequestError, match="this engine holds 256 tokens") as caught:
                await text_of(engine, prompt)
            assert (caught.value.code, caught.value.field) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt")
        assert held.encoded == []
        await made.idle(engine)

    run(scenario)


def test_the_longest_text_that_may_fit_is_served(scripted: Scripted) -> None:
    """The bound knows only bytes: a prompt of nothing but the longest token has as many as a prompt may have."""
    made = scripted(max_model_len=512)

    async def scenario() -> None:
        engine = await made.start()
        prompt = "<assistant>" * 511
        assert len(prompt) > LONG_CHARS
        [output] = [o async for o in engine.generate(prompt, replace(GREEDY, max_tokens=1), request_id="r")]
        assert output.prompt is not None
        assert len(output.prompt.prompt_token_ids) == 511

    run(scenario)


def test_a_long_prompt_does_not_wait_for_the_longest(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few megabyte prompts held every thread there was, and all prompts of some pages behind them."""
    made = scripted(max_model_len=100_000, num_blocks=400)
    held = HeldTokenizer(made.tokenizer, monkeypatch)

    async def scenario() -> None:
        engine = await made.start()
        longest = [asyncio.create_task(text_of(engine, "a" * (LONGEST_CHARS + 1))) for _ in range(64)]
        await asyncio.sleep(0)
        prompt = "b" * (LONG_CHARS + 1)
        assert await text_of(engine, prompt) == made.text(prompt, 8)
        assert not any(task.done() for task in longest)
        for task in longest:
            task.cancel()
        await asyncio.wait(longest)
        held.released.set()
        assert await text_of(engine, prompt) == made.text(prompt, 8)
        assert len([text for text in held.encoded if len(text) > LONGEST_CHARS]) <= 2, "nobody waits for the others"
        await made.idle(engine)

    run(scenario)


def test_a_drain_waits_for_no_prompt_that_is_encoded(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be refused when it is encoded: told at once, its client goes elsewhere, and the server ends in time."""
    made = scripted(max_model_len=100_000)
    held = HeldTokenizer(made.tokenizer, monkeypatch)

    async def scenario() -> None:
        engine = await made.start()
        tasks = [asyncio.create_task(text_of(engine, "a" * (LONGEST_CHARS + 1))) for _ in range(5)]
        await asyncio.sleep(0)
        await engine.drain(60)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, RequestError)
            assert error.code is ErrorCode.SHUTTING_DOWN
        held.released.set()

    run(scenario)


def test_an_engine_that_fails_fails_the_prompts_that_are_encoded(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a minute later they would be told the same."""
    made = scripted(max_model_len=100_000)
    held = HeldTokenizer(made.tokenizer, monkeypatch)

    def fail(step: Any) -> None:
        raise SystemExit("the device is gone")

    made.executor.on_step = fail

    async def scenario() -> None:
        engine = await made.start()
        waiting = asyncio.create_task(text_of(engine, "a" * (LONGEST_CHARS + 1)))
        await asyncio.sleep(0)
        for task in (asyncio.create_task(text_of(engine, "short")), waiting):
            with pytest.raises(EngineError, match="the device is gone"):
                await task
        held.released.set()

    run(scenario)


SERVE = """
import sys, threading
from castline.runtime.async_engine import AsyncEngine
from castline.runtime.loader import plan_engine
from castline.server.app import serve
from castline.server.event_loop import run
from castline.server.options import ServerOptions

def encode_for_ever(text, *, add_special_tokens):
    print("encoding", flush=True)
    threading.Event().wait()

async def open_engine():
    engine = await AsyncEngine.start(plan_engine(sys.argv[1]))
    engine.tokenizer.has_more = lambda text, num_tokens: False
    engine.tokenizer.encode = encode_for_ever
    return engine

run(serve(
    open_engine,
    ServerOptions(http_port=0, grpc_port=0),
    on_listening=lambda endpoints: None,
    on_ready=lambda model, endpoints: print(endpoints.http, flush=True),
))
"""


def test_a_server_ends_though_a_prompt_is_encoded(tiny_repository: Path) -> None:
    """C50: SIGTERM waited for the thread, half a minute past the drain time, and the client got a bare 500."""
    command = [sys.executable, "-c", SERVE, str(tiny_repository)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, ThreadPoolExecutor(1) as client:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().strip()
            body = {"prompt": "a" * (LONG_CHARS + 1), "max_tokens": 1}
            answer = client.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
            assert server.stdout.readline() == "encoding\n"
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0
            reply = answer.result(60)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
        finally:
            server.kill()
