"""Outputs that are written to the connection as they come, past the task that reads the stream."""

import asyncio
import re
import time
from typing import Any

import pytest

from castline.server.proto import castline_pb2 as pb

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def streamed(app: Any, path: str, fields: dict[str, Any]) -> str:
    """The body without what differs between two requests."""
    reply = app.http.post(path, json={"stream": True, "max_tokens": None, **fields})
    assert reply.headers["transfer-encoding"] == "chunked"
    return re.sub(r'"id":"[^"]*"|"created":\d+', "", reply.text)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"stop": ["🙂"]},
        {"stop": ["nothing like it", "ïve 🙂?"]},
        {"max_tokens": 1},
        {"stream_options": {"include_usage": True}},
        {"logprobs": True, "top_logprobs": 1},
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_both_ways_write_the_same(app: Any, path: str, fields: dict[str, Any]) -> None:
    """Prevents chunks that are framed, counted or ordered in another way than those of a task."""
    if path == "/v1/completions":
        fields = {key: 1 if key == "logprobs" else value for key, value in fields.items() if key != "top_logprobs"}
        fields = {"prompt": "ab", **fields}
    else:
        fields = {**CHAT, **fields}
    fast = streamed(app, path, fields)
    assert (app.engine.num_express > 0) == (fields.get("max_tokens") != 1)
    app.engine.uses_express = False
    assert streamed(app, path, fields) == fast


def test_an_echoed_prompt_comes_first_both_ways(app: Any) -> None:
    """Prevents the first tokens from overtaking the prompt that they follow."""
    fields = {"prompt": "ab", "echo": True, "logprobs": 1, "n": 2}
    fast = streamed(app, "/v1/completions", fields)
    app.engine.uses_express = False
    assert streamed(app, "/v1/completions", fields) == fast


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stop": ["🙂"]}, {"echo": True, "logprobs": 1, "n": 2}])
def test_an_answer_is_the_same_both_ways(app: Any, fields: dict[str, Any]) -> None:
    """Prevents whole answers that lose, repeat or reorder the tokens for which no task was woken."""
    body = {"prompt": "ab", "max_tokens": None, **fields}
    fast = app.http.post("/v1/completions", json=body).json()
    assert (app.engine.num_express > 0) == ("echo" not in fields), "what takes long is for the task"
    app.engine.uses_express = False
    slow = app.http.post("/v1/completions", json=body).json()
    assert [fast[part] for part in ("choices", "usage")] == [slow[part] for part in ("choices", "usage")]


def test_what_is_written_at_once_is_counted_once(app: Any) -> None:
    """Prevents token counts and intervals that miss the outputs no task has seen, or count them twice."""
    app.http.post("/v1/completions", json={"prompt": "ab", "max_tokens": None, "stream": True})
    assert app.engine.num_express > 0
    tokens = len(app.engine.reply_ids)
    found = app.http.get("/metrics").text
    assert re.search(rf"inter_token_latency_seconds_count.* {tokens - 1}\.0\n", found)
    assert re.search(rf"request_generation_tokens_sum.* {tokens}\.0\n", found)
    assert re.search(r"time_to_first_token_seconds_count.* 1\.0\n", found)


def called(app: Any, **params: Any) -> list[bytes]:
    """The messages of a gRPC stream, without what differs between two requests."""
    messages = list(app.inference.Generate(pb.GenerateRequest(prompt="ab", params=pb.SamplingParams(**params))))
    for message in messages:
        message.ClearField("request_id")
    return [message.SerializeToString(deterministic=True) for message in messages]


@pytest.mark.parametrize(
    "params", [{}, {"n": 3}, {"stop": ["🙂"]}, {"max_tokens": 1}, {"logprobs": 1, "prompt_logprobs": 1}]
)
def test_both_ways_send_the_same_messages(app: Any, params: dict[str, Any]) -> None:
    """Prevents messages that are counted or ordered in another way than those of a task. None may be sent twice."""
    fast = called(app, **params)
    assert (app.engine.num_express > 0) == (params.get("max_tokens") != 1)
    app.engine.uses_express = False
    slow = called(app, **params)
    assert sorted(fast) == sorted(slow)
    assert [fast[0], fast[-1]] == [slow[0], slow[-1]]


def test_a_call_that_is_not_read_delays_nobody_and_loses_nothing(app: Any) -> None:
    """Prevents one slow client from holding up the others, and messages that are lost while its window is full."""
    app.engine.reply_ids = [*b"x" * 4000]
    slow = app.inference.Generate(pb.GenerateRequest(prompt="a", params=pb.SamplingParams(max_tokens=4000, logprobs=5)))
    quick = called(app, max_tokens=5)
    assert len(quick) == 5
    messages = list(slow)
    assert "".join(message.text for message in messages) == "x" * 4000
    assert messages[-1].usage.completion_tokens == 4000


def test_no_method_is_waited_for_by_itself(app: Any) -> None:
    """Prevents every call from costing a look at a task for each method of every service."""

    async def waiting() -> list[str]:
        return [task.get_coro().__qualname__ for task in asyncio.all_tasks()]

    names = app.call(waiting()).result(60)
    assert [name for name in names if "_request_" in name] == ["AioServer._request_call"]


def test_an_idle_server_has_no_timer(app: Any) -> None:
    """Prevents a server that wakes up for nothing, many times a second on a machine that does other work too."""
    app.http.post("/v1/completions", json={"prompt": "ab", "stream": True})
    app.http.close()
    end = time.monotonic() + 60
    while timers := [timer for timer in app.loop._scheduled if not timer.cancelled()]:
        assert time.monotonic() < end, timers


def test_every_answer_has_the_date(app: Any) -> None:
    """Prevents a date that stands still because no timer moves it on."""
    for path in ("/health/ready", "/nowhere"):
        told = app.http.get(path).headers["date"]
        assert abs(time.mktime(time.strptime(told, "%a, %d %b %Y %H:%M:%S GMT")) - time.mktime(time.gmtime())) < 60
