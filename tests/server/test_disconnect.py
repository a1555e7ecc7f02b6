"""C46: a client that goes away takes its request with it."""

import json
import socket
from typing import Any

import pytest
from uvicorn.protocols.http import httptools_impl

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def send(app: Any, path: str, body: dict[str, Any]) -> socket.socket:
    """A request on a connection of its own, whose answer nobody has read yet."""
    raw = json.dumps(body).encode()
    host, _, port = app.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("hold_after", [0, 3], ids=["queued", "generating"])
def test_a_client_that_goes_away(app: Any, stream: bool, hold_after: int) -> None:
    """Prevents sequences that keep their KV blocks and their place in the batch with nobody to read them."""
    app.engine.hold_after = hold_after
    connection = send(app, "/v1/chat/completions", {**CHAT, "stream": stream})
    app.engine.wait_for_live(1)
    if stream and hold_after:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    connection.close()
    app.engine.wait_for_live(0)
    assert app.http.get("/health/ready").status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_goes_away_behind_a_large_body(app: Any, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a connection whose reading stays paused behind a body, and which never hears of its end."""
    monkeypatch.setattr(httptools_impl, "HIGH_WATER_LIMIT", 1000)  # what is large, so that it still comes in one piece
    app.engine.hold_after = 0
    raw = json.dumps({"prompt": "a", "stream": stream, "user": "u" * 4000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    host, _, port = app.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(head.encode())
    app.http.get("/health/live")  # by then the server waits for the body
    connection.sendall(raw)
    app.engine.wait_for_live(1)
    connection.close()
    app.engine.wait_for_live(0)


def test_all_prompts_of_a_request_go(app: Any) -> None:
    """Prevents the second prompt of a request from running on."""
    app.engine.hold_after = 2
    connection = send(app, "/v1/completions", {"prompt": ["a", "b", "c"], "stream": True})
    app.engine.wait_for_live(3)
    connection.close()
    app.engine.wait_for_live(0)


def test_a_client_that_sends_half_a_body(app: Any) -> None:
    """Prevents a request that was never complete from being run, or from being reported as a bug."""
    connection = send(app, "/v1/chat/completions", CHAT)
    connection.close()
    host, _, port = app.url.removeprefix("http://").partition(":")
    half = socket.create_connection((host, int(port)), timeout=60)
    half.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
    half.close()
    assert app.http.get("/health/ready").status_code == 200
    app.engine.wait_for_live(0)


def test_a_connection_serves_many_requests(app: Any) -> None:
    """Prevents watching for a disconnect from breaking keep-alive."""
    connection = send(app, "/v1/completions", {"prompt": "a", "max_tokens": 1})
    for _ in range(3):
        answer = b""
        while b'"cached_tokens":0}}}' not in answer:
            answer += connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200")
        raw = b'{"prompt":"a","max_tokens":1}'
        head = f"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
    connection.close()
    app.engine.wait_for_live(0)


def test_slow_reader_delays_nobody(app: Any) -> None:
    """Prevents one client that does not read from holding up the others."""
    app.engine.reply_ids = [*b"x" * 4000]
    slow = send(app, "/v1/completions", {"prompt": "a", "max_tokens": 4000, "n": 16, "stream": True})
    assert slow.recv(1)
    assert len(app.engine.live) == 1
    quick = app.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
    assert quick.json()["choices"][0]["text"] == "xxxxx"
    slow.close()
    app.engine.wait_for_live(0)
