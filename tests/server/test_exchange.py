"""The short ways of an exchange against the messages of ASGI that they stand for."""

import asyncio
import socket
from typing import Any, cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from castline.server.http_exchange import Exchange

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Transport:
    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    is_closing = resume_reading = pause_reading = lambda self: self.closed


def cycle_over(transport: Transport, ended: list[str], *, keep_alive: bool) -> RequestResponseCycle:
    return RequestResponseCycle(
        scope=cast(Any, {"method": "POST", "type": "http"}),
        transport=cast(asyncio.Transport, transport),
        flow=FlowControl(cast(asyncio.Transport, transport)),
        logger=cast(Any, None),
        access_logger=cast(Any, None),
        access_log=False,
        default_headers=[(b"date", b"Thu, 01 Jan 1970 00:00:00 GMT")],
        message_event=asyncio.Event(),
        expect_100_continue=True,
        keep_alive=keep_alive,
        on_response=lambda: ended.append("ended"),
    )


def state(cycle: RequestResponseCycle, transport: Transport, ended: list[str]) -> tuple[Any, ...]:
    done = cycle.response_started, cycle.response_complete, cycle.chunked_encoding, cycle.waiting_for_100_continue
    return transport.written, transport.closed, ended, *done


async def by_messages(keep_alive: bool, events: list[bytes], end: bytes) -> tuple[Any, ...]:
    transport, ended = Transport(), []
    cycle = cycle_over(transport, ended, keep_alive=keep_alive)
    await cycle.send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    for event in events:
        await cycle.send({"type": "http.response.body", "body": event, "more_body": True})
    await cycle.send({"type": "http.response.body", "body": end, "more_body": False})
    return state(cycle, transport, ended)


async def by_exchange(keep_alive: bool, events: list[bytes], end: bytes, *, at_once: bool) -> tuple[Any, ...]:
    transport, ended = Transport(), []
    cycle = cycle_over(transport, ended, keep_alive=keep_alive)
    exchange = Exchange(cast(Any, None), cycle)
    for event in events:
        if at_once:
            exchange.write_events(event)
        else:
            await exchange.send_events(event)
    await exchange.send_last_events(end)
    return state(cycle, transport, ended)


@pytest.mark.parametrize("events", [[], [b"data: 1\n\n"], [b"data: 1\n\n", b"data: " + b"x" * 300 + b"\n\n"]])
@pytest.mark.parametrize("keep_alive", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_stream_is_what_its_messages_would_be(events: list[bytes], keep_alive: bool, at_once: bool) -> None:
    """Prevents another head, other chunks, and a connection left open, closed or waiting where ASGI's would not be."""
    end = b"data: [DONE]\n\n"
    expected = asyncio.run(by_messages(keep_alive, events, end))
    found = asyncio.run(by_exchange(keep_alive, events, end, at_once=at_once))
    assert sorted(found[0].partition(b"\r\n\r\n")[0].split(b"\r\n")) == sorted(
        expected[0].partition(b"\r\n\r\n")[0].split(b"\r\n")
    )
    assert found[0].partition(b"\r\n\r\n")[2] == expected[0].partition(b"\r\n\r\n")[2]
    assert found[1:] == expected[1:]


def test_a_paused_client_is_waited_for() -> None:
    """Prevents a slow reader's stream from growing in memory."""

    async def scenario() -> None:
        transport = Transport()
        cycle = cycle_over(transport, [], keep_alive=True)
        exchange = Exchange(cast(Any, None), cycle)
        cycle.flow.pause_writing()
        assert not exchange.can_write
        sending = asyncio.create_task(cast(Any, exchange.send_events(b"data: 1\n\n")))
        await asyncio.sleep(0)
        assert transport.written == b""
        cycle.flow.resume_writing()
        await sending
        assert transport.written.endswith(b"data: 1\n\n\r\n")

    asyncio.run(scenario())


def request(prompt: str) -> bytes:
    body = b'{"prompt":"%b","stream":true,"max_tokens":null}' % prompt.encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def answers(app: Any, count: int, *pieces: bytes) -> list[str]:
    """Bodies of the answers to *count* requests that come in *pieces*, each a turn of the server's loop apart."""
    with socket.create_connection((app.http.base_url.host, app.http.base_url.port), timeout=30) as connection:
        for piece in pieces:
            connection.sendall(piece)
            app.http.get("/health/live")
        received = b""
        while received.count(b"[DONE]") < count:
            received += connection.recv(65536)
    return received.decode().split("HTTP/1.1 200 OK\r\n")[1:]


def test_a_body_may_come_whole_or_in_pieces(app: Any) -> None:
    """Prevents a prompt that is taken before all of it has come."""
    whole = request("abcdef")
    answers(app, 1, whole)
    answers(app, 1, whole[:-40], whole[-40:-20], whole[-20:])
    answers(app, 1, whole[: whole.index(b"\r\n\r\n") + 4], whole[whole.index(b"\r\n\r\n") + 4 :])
    assert [request["ids"] for request in app.engine.requests] == [[256, *b"abcdef"]] * 3


def test_requests_that_come_together_are_answered_one_by_one(app: Any) -> None:
    """Prevents a stream that is written into the answer of another request of its connection."""
    first, second = answers(app, 2, request("ab") + request("cd"))
    for answer in (first, second):
        assert answer.count("[DONE]") == 1
        assert answer.count("transfer-encoding: chunked") == 1
        assert answer.count('"finish_reason":"stop"') == 1
    assert [request["ids"] for request in app.engine.requests] == [[256, *b"ab"], [256, *b"cd"]]
