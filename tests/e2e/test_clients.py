"""Real clients against the real server with the demo engine."""

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from castline.server.proto import castline_pb2, castline_pb2_grpc

pytestmark = pytest.mark.slow

Serve = Callable[..., contextlib.AbstractContextManager[Any]]
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
MODEL = "smollm2"


@pytest.fixture(scope="module")
def server(default_engine: Path, serve: Serve) -> Iterator[Any]:
    with serve(default_engine) as running:
        yield running


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0)


def greedy_chat(client: openai.OpenAI, **options: Any) -> str:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        **options,  # type: ignore[arg-type]
    )
    return reply.choices[0].message.content or ""


def test_paris(server: Any) -> None:
    """What the README promises of its first command."""
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    reply = httpx.post(f"{server.http_url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert "Paris" in reply.json()["choices"][0]["message"]["content"]


def test_openai_stream_and_grpc_agree(server: Any, client: openai.OpenAI) -> None:
    """One engine behind three doors: the greedy text is the same through each."""
    whole = greedy_chat(client)
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        stream=True,  # type: ignore[arg-type]
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = castline_pb2_grpc.InferenceStub(channel)
        message = castline_pb2.ChatMessage(role="user", content=QUESTION[0]["content"])
        request = castline_pb2.GenerateRequest(
            messages=castline_pb2.ChatMessages(messages=[message]),
            params=castline_pb2.SamplingParams(temperature=0, max_tokens=24),
        )
        over_grpc = "".join(reply.text for reply in stub.Generate(request, timeout=60))
    assert "Paris" in whole
    assert streamed == whole
    assert over_grpc == whole


def test_start_up_prints_what_operators_look_for(server: Any) -> None:
    text = "\n".join(server.log)
    assert re.search(r"KV cache: \d+ blocks", text), text
    assert re.search(r"[Mm]aximum concurrency .*: [\d.]+x", text), text


def test_seeded_sampling_is_independent_of_the_batch(client: openai.OpenAI) -> None:
    """A seeded request gives one text, whether alone or beside others."""

    def seeded(n: int) -> list[str]:
        reply = client.completions.create(
            model=MODEL, prompt="The old house", temperature=0.9, seed=7, max_tokens=16, n=n
        )
        return [choice.text for choice in reply.choices]

    assert seeded(1)[0] == seeded(3)[0]
    assert len(set(seeded(3))) > 1


def test_sigterm_drains(default_engine: Path, serve: Serve) -> None:
    """C50: the stream that runs ends whole, a new request is refused, the process exits with 0."""
    with serve(default_engine, "--drain-timeout", "200") as running:
        client = openai.OpenAI(base_url=f"{running.http_url}/v1", api_key="none", max_retries=0)
        chunks = client.completions.create(
            model=MODEL, prompt="Once", max_tokens=300, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        stream = iter(chunks)
        next(stream)
        os.kill(running.process.pid, signal.SIGTERM)
        while httpx.get(f"{running.http_url}/health/ready").status_code == 200:
            pass  # until the signal has been handled
        refused = httpx.post(f"{running.http_url}/v1/completions", json={"model": MODEL, "prompt": "Twice"})
        assert refused.status_code == 503, refused.text
        finish = None
        for chunk in stream:
            if chunk.choices:
                finish = chunk.choices[0].finish_reason or finish
        assert finish == "length"
        assert running.wait(200) == 0
