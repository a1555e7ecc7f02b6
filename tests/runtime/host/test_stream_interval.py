"""Fewer messages with more tokens each: through the real server, over both transports, and at the edges."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from threading import Semaphore
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castline.engines.errors import EngineError
from castline.runtime.async_engine import AsyncEngine
from castline.runtime.client import Output
from castline.runtime.events import FinishReason
from castline.runtime.live_request import LiveRequest
from castline.runtime.stream_interval import AdaptiveInterval, StreamInterval
from castline.server.app import Server
from castline.server.options import ServerOptions
from castline.server.proto import castline_pb2 as pb
from castline.server.proto import castline_pb2_grpc


async def http_texts(server: Server) -> AsyncIterator[str]:
    body = {"prompt": "ab", "max_tokens": 11, "temperature": 0, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(base_url=server.endpoints.http, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as reply,
    ):
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


async def grpc_texts(server: Server) -> AsyncIterator[str]:
    params = pb.SamplingParams(max_tokens=11, temperature=0, ignore_eos=True)
    async with grpc.aio.insecure_channel(server.endpoints.grpc.removeprefix("grpc://")) as channel:
        call = castline_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(prompt="ab", params=params))
        async for message in call:
            yield message.text


@asynccontextmanager
async def serving(engine: AsyncEngine) -> AsyncIterator[Server]:
    """Both doors, on free ports."""
    server = Server(ServerOptions(http_port=0, grpc_port=0))
    await server.listen()
    await server.open(engine)
    yield server
    await server.drain()
    await server.close()


@pytest.mark.parametrize("texts", [http_texts, grpc_texts])
@pytest.mark.parametrize("interval", [1, 4])
def test_messages_have_that_many_tokens(scripted: Callable[..., Any], texts: Any, interval: int) -> None:
    """Prevents an option that a transport ignores, that loses text, or that delays the first token."""
    made = scripted()
    parts: list[str] = []

    async def scenario() -> None:
        engine = await made.start(interval=StreamInterval(interval))
        made.executor.gate = Semaphore(3)
        async with serving(engine) as server:
            async for text in texts(server):
                parts.append(text)
                if len(parts) == 1:
                    made.open_gate()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert "".join(parts) == made.text("ab", 11)
    assert len(parts[0]) <= 3, "the first token does not wait for the interval"
    assert all(len(part) >= interval for part in parts[1:-1])  # a reader that is late gets more


@pytest.mark.parametrize("texts", [http_texts, grpc_texts])
def test_messages_become_longer_in_flight_under_load(
    scripted: Callable[..., Any], texts: Any, loaded_interval: AdaptiveInterval
) -> None:
    """Prevents an interval that follows the load, and streams that keep the one they began with."""
    made = scripted()
    parts: list[str] = []
    metrics: list[str] = []

    async def scenario() -> None:
        engine = await made.start(interval=loaded_interval)
        made.executor.gate = Semaphore(1)
        async with serving(engine) as server:
            async for text in texts(server):
                parts.append(text)
                if len(parts) == 1:
                    async with httpx.AsyncClient(base_url=server.endpoints.http, timeout=60) as client:
                        metrics.append((await client.get("/metrics")).text)
                    made.open_gate()
            assert engine.stream_interval() == 1, "no request is left"

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert 'castline:stream_interval_tokens{model_name="smol"} 8.0\n' in metrics[0]
    assert "".join(parts) == made.text("ab", 11)
    assert len(parts[0]) == 1
    assert all(len(part) >= 8 for part in parts[1:-1])  # a reader that is late gets more
    assert len(parts) <= 3


async def streamed_and_whole(server: Server, path: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    """The same request twice: choices by index and usage of the stream, put together, and of the whole answer."""
    async with httpx.AsyncClient(base_url=server.endpoints.http, timeout=60) as client:
        body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
        lines = (await client.post(path, json=body)).text.splitlines()
        whole = (await client.post(path, json=fields)).json()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    choices: dict[int, dict[str, Any]] = {}
    for part in (choice for chunk in chunks for choice in chunk["choices"]):
        add_part(choices.setdefault(part["index"], {}), part)
    answer = {choice["index"]: add_part({}, choice) for choice in whole["choices"]}
    return (choices, chunks[-1]["usage"]), (answer, whole["usage"])


def add_part(choice: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Texts and lists grow; what is said once stays."""
    text = part["text"] if "text" in part else part.get("delta", part.get("message", {})).get("content")
    choice["text"] = choice.get("text", "") + (text or "")
    for name, values in (part.get("logprobs") or {}).items():
        choice[name] = choice.get(name, []) + (values or [])
    for name in ("finish_reason", "stop_reason"):
        if part.get(name) is not None:
            assert choice.get(name) is None, "said twice"
            choice[name] = part[name]
    return choice


ANY_PATH: list[dict[str, Any]] = [
    {},
    {"max_tokens": 1},
    {"n": 2, "temperature": 3.0, "seed": 5},
    {"stop": True},
    {"stop": True, "n": 2, "logprobs": 2},
    {"logprobs": 2, "temperature": 3.0, "seed": 5, "n": 2},
    {"stop_token_ids": list(range(ord("a"), ord("f"))), "min_tokens": 12, "ignore_eos": False},
    {"frequency_penalty": 1.5, "seed": 1, "temperature": 2.0},
]
COMPLETIONS_ONLY: list[dict[str, Any]] = [
    {"echo": True, "logprobs": 1, "n": 2},
    {"prompt": ["ab", "xyz", "qqq"], "n": 2, "temperature": 3.0, "seed": 5},
]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *(("/v1/completions", fields) for fields in ANY_PATH + COMPLETIONS_ONLY),
        *(("/v1/chat/completions", fields) for fields in ANY_PATH),
    ],
    ids=str,
)
def test_an_answer_is_its_stream_put_together(scripted: Callable[..., Any], path: str, fields: dict[str, Any]) -> None:
    """Prevents answers for which the engine process held tokens back from losing some, or counting others."""
    made = scripted(max_num_seqs=4)
    chat = path != "/v1/completions"
    fields = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, **fields}
    stops = fields.pop("stop", False)
    if not chat:
        fields = {"prompt": "ab", **fields}
    else:
        fields["messages"] = [{"role": "user", "content": "ab"}]
        if "logprobs" in fields:
            fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    asked: list[bool] = []
    add_request = made.core.add_request

    def add(request: Any) -> None:
        asked.append(request.streams)
        add_request(request)

    made.core.add_request = add

    async def scenario() -> None:
        engine = await made.start(interval=StreamInterval(8))
        async with serving(engine) as server:
            streamed, whole = await streamed_and_whole(server, path, fields)
            if stops:
                asked.clear()
                text = whole[0][0]["text"]
                fields["stop"] = ["no such text", text[20:23]]
                streamed, whole = await streamed_and_whole(server, path, fields)
                assert whole[0][0]["text"] == text[:20]
                assert whole[0][0]["stop_reason"] == text[20:23]
        assert whole == streamed
        assert whole[1]["completion_tokens"] > 0
        count = len(asked) // 2
        assert asked == [True] * count + [False] * count

    asyncio.run(asyncio.wait_for(scenario(), 60))


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_gathering_changes_the_cuts_only(data: st.DataObject) -> None:
    """Continuations must not mix, and neither an end nor an error may leave tokens behind."""
    interval = data.draw(st.integers(1, 5))
    events = data.draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), max_size=20))
    fails = data.draw(st.booleans())
    live = LiveRequest("r", 2, None, StreamInterval(interval))
    sent: dict[int, list[int]] = {0: [], 1: []}
    read: list[Output] = []

    async def scenario() -> None:
        for place, (index, count) in enumerate(events):
            tokens = tuple(range(100 * place, 100 * place + count))
            sent[index] += tokens
            live.keep(Output(index, "x" * count, tokens))
            if live._unread:
                read.append(await some(live))
        if fails:
            live.fail(EngineError("why"))
        else:
            for index in sent:
                live.keep(Output(index, "", (), finish_reason=FinishReason.LENGTH))
        with pytest.raises(EngineError) if fails else pytest.raises(StopAsyncIteration):
            while True:
                read.append(await some(live))

    async def some(live: LiveRequest) -> Output:
        output = await live.next()
        if output is None:
            raise StopAsyncIteration
        return output

    asyncio.run(scenario())
    for index, tokens in sent.items():
        parts = [output.token_ids for output in read if output.index == index]
        assert [token for part in parts for token in part] == tokens
        with_tokens = [part for part in parts if part]
        assert all(len(part) >= interval for part in with_tokens[1:-1])
