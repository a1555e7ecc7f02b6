"""Cases of the API whose parts are tested apart, here through HTTP, the real tokenizer and the real engine."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

MAX_MODEL_LEN = 64
PARIS = 7042
"""The id of " Paris"."""
ASK = {"messages": [{"role": "user", "content": "Say a word."}]}


@pytest.fixture(scope="module")
def client(
    default_engine: Path, serve: Callable[..., contextlib.AbstractContextManager[Any]]
) -> Iterator[Callable[[str, dict[str, Any]], httpx.Response]]:
    with serve(default_engine, "--max-model-len", str(MAX_MODEL_LEN)) as server:

        def post(path: str, body: dict[str, Any]) -> httpx.Response:
            url = f"{server.http_url}/v1/{path}"
            return httpx.post(url, json={"model": "smollm2", "temperature": 0, **body}, timeout=60)

        yield post


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("completions", {"prompt": [7] * 64}, "prompt", "context_length_exceeded"),  # C07
        ("completions", {"prompt": [7] * 65}, "prompt", "context_length_exceeded"),
        ("completions", {"prompt": "a", "logit_bias": {"49152": 1}}, "logit_bias[49152]", "invalid_value"),  # C30
        ("completions", {"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias[-1]", "invalid_value"),
        ("completions", {"prompt": "a", "logit_bias": {"abc": 1}}, "logit_bias[abc]", "invalid_value"),
        ("completions", {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias[5]", "invalid_value"),
        ("completions", {"prompt": ""}, "prompt", "invalid_value"),  # C33; this tokenizer adds no BOS
        ("completions", {"prompt": [""]}, "prompt", "invalid_value"),
        ("completions", {"prompt": []}, "prompt", "invalid_value"),
        ("chat/completions", {"messages": []}, "messages", "invalid_value"),
        ("chat/completions", {**ASK, "max_tokens": 0}, "max_tokens", "invalid_value"),  # C34
        (
            "chat/completions",
            {**ASK, "logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            "invalid_value",
        ),
    ],
)
def test_refused_by_name(
    client: Callable[[str, dict[str, Any]], httpx.Response], path: str, body: dict[str, Any], param: str, code: str
) -> None:
    """A bad field is a 400 that names it, and the next request works."""
    refused = client(path, body)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert client("completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_last_place_of_the_context(client: Callable[[str, dict[str, Any]], httpx.Response]) -> None:
    """C07: a prompt of 63 in a context of 64 gives exactly one token, and `length`."""
    reply = client("completions", {"prompt": [7] * 63, "max_tokens": 5, "ignore_eos": True}).json()
    assert reply["usage"]["completion_tokens"] == 1
    assert reply["choices"][0]["finish_reason"] == "length"


def test_context_is_filled_and_not_shifted(client: Callable[[str, dict[str, Any]], httpx.Response]) -> None:
    """C26: without a limit and without EOS a text ends at the end of the context."""
    reply = client("completions", {"prompt": [7] * 40, "max_tokens": None, "ignore_eos": True}).json()
    assert reply["usage"]["completion_tokens"] == MAX_MODEL_LEN - 40
    assert reply["choices"][0]["finish_reason"] == "length"


def test_forbidden_token(client: Callable[[str, dict[str, Any]], httpx.Response]) -> None:
    """C30: a bias of -100 forbids the token that would have come."""
    body = {"prompt": "The capital of France is", "max_tokens": 1, "logprobs": 1}
    first = client("completions", body).json()["choices"][0]["text"]
    assert first == " Paris"
    forbidden = client("completions", {**body, "logit_bias": {str(PARIS): -100}}).json()["choices"][0]["text"]
    assert forbidden != first


def test_echo_without_generation(client: Callable[[str, dict[str, Any]], httpx.Response]) -> None:
    """C34: max_tokens 0 with echo and logprobs gives the prompt, and a logprob for each token but the first."""
    prompt = "The sea is blue"
    reply = client("completions", {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 2}).json()
    choice = reply["choices"][0]
    assert choice["text"] == prompt
    assert "".join(choice["logprobs"]["tokens"]) == prompt
    first, *others = choice["logprobs"]["token_logprobs"]
    assert first is None
    assert all(math.isfinite(value) for value in others)
    assert len(others) + 1 == reply["usage"]["prompt_tokens"]


def test_chat_logprobs_join_to_the_text(client: Callable[[str, dict[str, Any]], httpx.Response]) -> None:
    """C38: bytes of the tokens are the text, an empty top list where none was asked for, and finite numbers only."""
    body = {**ASK, "max_tokens": 6, "logprobs": True, "ignore_eos": True}
    reply = client("chat/completions", body)
    json.loads(reply.text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    choice = reply.json()["choices"][0]
    tokens = choice["logprobs"]["content"]
    assert all(token["top_logprobs"] == [] for token in tokens)
    spoken = b"".join(bytes(token["bytes"]) for token in tokens if token["bytes"] is not None)
    assert spoken.decode() == choice["message"]["content"]
