"""Every HTTP error has OpenAI's shape, a true status, and leaves the server working."""

import contextlib
import json
import socket
from typing import Any

import grpc
import httpx
import openai
import pytest

from castline.engines.errors import EngineError, ErrorCode, RequestError
from castline.server import http_protocol, http_wire
from castline.server.errors import TABLE, ServerCode, to_wire
from castline.server.http_protocol import MAX_HEAD_BYTES
from castline.server.serving import MAX_MESSAGE_BYTES

JSON = {"content-type": "application/json"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def error_of(reply: httpx.Response) -> dict[str, Any]:
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def test_every_code_has_a_row() -> None:
    """Prevents a KeyError where an error is reported, and a client's fault that is reported as the server's."""
    assert set(TABLE) == {*ErrorCode, *ServerCode}
    for row in TABLE.values():
        assert (row.openai_type == "invalid_request_error") == (400 <= row.http_status < 500) or row.http_status == 429
        assert row.grpc_code is not grpc.StatusCode.OK


def test_what_was_not_raised_on_purpose_is_told_without_detail() -> None:
    """Prevents internals from leaking to clients."""
    assert "secret" not in to_wire(ValueError("secret")).message
    assert to_wire(EngineError("no memory")).code is ErrorCode.ENGINE_FAILED


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_wrong_paths_and_methods(app: Any, method: str, path: str, status: int, code: str) -> None:
    """Prevents plain-text errors, which clients cannot read."""
    reply = app.http.request(method, path)
    assert (reply.status_code, error_of(reply)["code"]) == (status, code)
    assert ("allow" in reply.headers) == (status == 405)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_wrong_content_type(app: Any, path: str, content_type: str | None) -> None:
    """Prevents a form from being taken for JSON."""
    headers = {"content-type": content_type} if content_type else {}
    reply = app.http.post(path, content=b"{}", headers=headers)
    assert reply.status_code == 415
    assert "application/json" in error_of(reply)["message"]


def test_content_type_may_say_more(app: Any) -> None:
    """Prevents refusing a charset parameter."""
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert app.http.post("/v1/chat/completions", content=json.dumps(CHAT), headers=headers).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"null", b'{"messages": NaN}', b"\xff\xfe"])
def test_malformed_json(app: Any, body: bytes) -> None:
    """Prevents a 500 for what the client sent."""
    reply = app.http.post("/v1/chat/completions", content=body, headers=JSON)
    assert reply.status_code == 400
    assert error_of(reply)["type"] == "invalid_request_error"


def test_unknown_field_is_named(app: Any) -> None:
    """Prevents a misspelt option that is accepted and ignored."""
    reply = app.http.post("/v1/chat/completions", json={**CHAT, "max_token": 5})
    assert reply.status_code == 400
    assert error_of(reply)["param"] == "max_token"


def test_body_limit(app: Any) -> None:
    """C48: prevents a large prompt from being refused below the documented limit, and an error that hides it."""
    arrived = app.http.post("/v1/completions", json={"prompt": "x" * (5 * 2**20)})
    assert error_of(arrived)["code"] == "context_length_exceeded"
    too_large = b'{"prompt": "' + b"x" * MAX_MESSAGE_BYTES + b'"}'
    refused = app.http.post("/v1/completions", content=too_large, headers=JSON)
    assert refused.status_code == 413
    assert str(MAX_MESSAGE_BYTES) in error_of(refused)["message"]
    # Without a length, the limit is found while reading.
    chunked = app.http.post("/v1/completions", content=iter([too_large]), headers=JSON)
    assert chunked.status_code == 413
    assert app.http.post("/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_has_its_status(app: Any, stream: bool) -> None:
    """Prevents a stream that begins with 200 and cannot go on."""
    app.engine.fail_after = 0
    reply = app.http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert (reply.status_code, error_of(reply)["code"]) == (500, "engine_failed")
    app.engine.fail_after = None
    assert app.http.post("/v1/chat/completions", json={**CHAT, "stream": stream}).status_code == 200


def test_a_failure_in_a_stream_is_its_last_event(app: Any) -> None:
    """Prevents a broken stream that looks complete: the error is told, and no [DONE] follows."""
    app.engine.fail_after = 3
    events = app.http.post("/v1/chat/completions", json={**CHAT, "stream": True}).text.split("\n\n")
    assert events[-1] == ""
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "engine_failed"
    assert len(events) == 1 + 3 + 1 + 1, "role, three tokens, the error, the end"
    with pytest.raises(openai.APIError, match="the step failed"):
        list(app.openai.chat.completions.create(model="tiny", stream=True, **CHAT))


def test_an_unexpected_failure_is_a_500_without_detail(app: Any) -> None:
    """Prevents one bug from taking down the server, or showing its inside."""
    app.engine.fail_after, app.engine.failure = 0, ValueError("a secret")
    reply = app.http.post("/v1/chat/completions", json=CHAT)
    assert (reply.status_code, error_of(reply)["code"]) == (500, "internal_error")
    assert "secret" not in reply.text


def test_overload_says_when_to_come_back(start: Any, make_engine: Any) -> None:
    """Prevents clients that give up, or try again at once, when the queue is full."""
    with start(make_engine(max_waiting=0)) as app:
        reply = app.http.post("/v1/chat/completions", json=CHAT)
        assert (reply.status_code, error_of(reply)["code"]) == (429, "overloaded")
        assert int(reply.headers["retry-after"]) > 0


def test_more_texts_than_places_are_refused_for_good(app: Any) -> None:
    """Prevents "try again later" for what never can be taken, and a list that is half begun."""
    body = {"model": "tiny", "prompt": ["a", "b"], "n": 128, "max_tokens": 1}
    reply = app.http.post("/v1/completions", json=body)
    assert (reply.status_code, error_of(reply)["param"]) == (413, "n")
    assert "at most 68" in error_of(reply)["message"]
    assert not app.engine.live


def test_a_deadline_is_a_504() -> None:
    """Prevents a time-out that is reported as the client's mistake."""
    assert to_wire(RequestError("late", code=ErrorCode.DEADLINE_EXCEEDED)).row.http_status == 504


def test_models(app: Any) -> None:
    """Prevents clients that list models first from finding none."""
    (model,) = app.openai.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "castline")
    assert app.openai.models.retrieve("tiny").id == "tiny"
    assert app.http.get("/v1/models").json()["data"][0]["max_model_len"] == 4096


def test_served_name(start: Any, make_engine: Any) -> None:
    """Prevents answering to the name in the manifest when another was asked for; names may have slashes."""
    with start(make_engine(), model_name="org/model") as app:
        assert app.openai.models.retrieve("org/model").id == "org/model"
        assert app.http.post("/v1/chat/completions", json={**CHAT, "model": "org/model"}).json()["model"] == "org/model"
        assert app.http.post("/v1/chat/completions", json={**CHAT, "model": "tiny"}).status_code == 404


def raw_answer(app: Any, *pieces: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of what *pieces*, each sent when the last was taken, are answered before the server closes."""
    with socket.create_connection((app.http.base_url.host, app.http.base_url.port), timeout=30) as connection:
        for piece in pieces:
            try:
                connection.sendall(piece)
            except OSError:  # refused already
                break
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # what the server had not read yet
            while data := connection.recv(65536):
                answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("start", [b"GET /health/live HTTP/1.1\r\nx: ", b"GET /health/live HTTP/1.1\r\n", b"GET /"])
def test_endless_headers_are_refused(app: Any, start: bytes) -> None:
    """Prevents one connection from taking all memory, and the event loop, with a request that never begins."""
    line = b"x: y\r\n" if start.endswith(b"\n") else b"aaaaaa"
    status, error = raw_answer(app, start, *[line * 3000] * 1000)
    assert (status, error["code"]) == (413, "request_too_large")
    assert str(MAX_HEAD_BYTES) in error["message"]
    assert app.http.get("/health/live").status_code == 200


def test_headers_below_the_limit_are_taken_in_any_pieces(app: Any) -> None:
    """Prevents the limit from counting a body, or the request before: the connection is the same."""
    body = json.dumps({**CHAT, "user": "u" * 2 * MAX_HEAD_BYTES})
    headers = {**JSON, "x-long": "h" * (MAX_HEAD_BYTES // 2)}
    for _ in range(3):
        assert app.http.post("/v1/chat/completions", content=body, headers=headers).status_code == 200


@pytest.mark.parametrize("cut", [60, 120])
def test_a_head_in_pieces_may_end_before_a_large_body(app: Any, monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    """Prevents the limit from counting the body behind a head's last piece, or the request before its first."""
    monkeypatch.setattr(http_protocol, "MAX_HEAD_BYTES", 500)  # below what comes in one piece
    body = json.dumps({**CHAT, "user": "u" * 3000}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-type: application/json\r\nx-more: %b\r\n" % (b"h" * 100)
    request = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
    with socket.create_connection((app.http.base_url.host, app.http.base_url.port), timeout=30) as connection:
        answer = b""
        for piece in (request[:cut], request[cut:] + request[:cut], request[cut:]):
            connection.sendall(piece)
            app.http.get("/health/live")
        while answer.count(b'"cached_tokens"') < 2 and (data := connection.recv(65536)):
            answer += data
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200"]


def test_what_is_no_http_is_told_so_in_openais_shape(app: Any) -> None:
    """Prevents a plain-text answer, which clients cannot read."""
    status, error = raw_answer(app, b"\x16\x03\x01 no HTTP\r\n\r\n")
    assert (status, error["code"], error["type"]) == (400, "bad_request", "invalid_request_error")


@pytest.mark.parametrize(
    "start",
    [
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{",
    ],
    ids=["head", "body"],
)
def test_a_request_that_stops_half_way_is_ended(app: Any, monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    """Prevents clients that send half a request from holding sockets and memory for as long as they like."""
    monkeypatch.setattr(http_wire, "RECEIVE_TIMEOUT_S", 0.2)
    status, error = raw_answer(app, start)
    assert (status, error["code"]) == (408, "request_timeout")
    assert "0.2 s" in error["message"]


def wait_for_close(app: Any) -> bytes:
    """What a new connection is told before the server closes it."""
    with socket.create_connection((app.http.base_url.host, app.http.base_url.port), timeout=30) as connection:
        return connection.recv(1)


def test_a_connection_that_asks_nothing_is_closed(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above; it is told nothing, for a client may take an answer for that of its next request."""
    monkeypatch.setattr(http_wire, "RECEIVE_TIMEOUT_S", 0.2)
    assert wait_for_close(app) == b""


@pytest.mark.parametrize(
    ("request_", "status", "more"),
    [
        (b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n", b"200", b"\r\n"),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\n\r\n", b"415", b"{"),
    ],
    ids=["CRLF", "refused body"],
)
def test_a_connection_that_goes_on_with_no_request_is_closed(
    app: Any, monkeypatch: pytest.MonkeyPatch, request_: bytes, status: bytes, more: bytes
) -> None:
    """Prevents bytes behind an answer that begin no request from keeping the connection open for ever."""
    monkeypatch.setattr(http_wire, "RECEIVE_TIMEOUT_S", 0.2)
    with socket.create_connection((app.http.base_url.host, app.http.base_url.port), timeout=30) as connection:
        connection.sendall(request_)
        assert connection.recv(65536).startswith(b"HTTP/1.1 " + status)
        connection.sendall(more)
        while connection.recv(65536):  # times out, and raises, where the server does not close
            pass


def streaming(app: Any, headers: bytes = b"") -> socket.socket:
    """A connection that has asked for a stream, with further *headers*."""
    body = json.dumps({**CHAT, "model": "tiny", "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + headers
    connection = socket.create_connection((app.http.base_url.host, app.http.base_url.port), timeout=30)
    connection.sendall(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
    return connection


def test_a_slow_answer_is_no_late_request(app: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents the limit from ending a request that has come whole."""
    monkeypatch.setattr(http_wire, "RECEIVE_TIMEOUT_S", 0.2)
    engine.hold_after = 1
    with streaming(app, b"connection: close\r\n") as connection:
        engine.wait_for_live(1)
        assert wait_for_close(app) == b""  # by then its own time would have passed
        app.release()
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"[DONE]" in answer


def test_a_late_request_ends_no_answer_before_it(app: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents half a request from costing the one that is being answered on its connection the rest of its text."""
    monkeypatch.setattr(http_wire, "RECEIVE_TIMEOUT_S", 0.2)
    engine.hold_after = 1
    with streaming(app) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        engine.wait_for_live(1)
        assert wait_for_close(app) == b""  # by then the second request's time would have passed
        app.release()
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"[DONE]" in answer
    assert b"HTTP/1.1 408" in answer


def test_a_late_head_behind_one_that_came_in_pieces(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents the end of one head from taking away the time limit of the next, which begins in the same piece."""
    monkeypatch.setattr(http_wire, "RECEIVE_TIMEOUT_S", 0.2)
    head = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"
    with socket.create_connection((app.http.base_url.host, app.http.base_url.port), timeout=30) as connection:
        connection.sendall(head)
        app.http.get("/health/live")
        connection.sendall(b"\r\n" + head)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"408"]
