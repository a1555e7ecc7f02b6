"""An OpenAI-compatible server that does what a test scripts, and an event loop whose time is the test's."""

import asyncio
import json
import selectors
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

TOKENS_PER_WORD = 2
BASE_TOKENS = 3
PROBE_MAX_TOKENS = 4
"""What the preflight asks for; tests ask for other lengths, so that only measured requests are scripted."""


class ScriptedServer:
    """Answers completions with words, and does as ``behave`` says for each measured request (counted from 0)."""

    def __init__(self) -> None:
        # The protocol is named, or asyncio leaves Nagle on and small frames wait 40 ms for an acknowledgement.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(256)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        routes = [
            Route("/v1/models", self._models),
            Route("/metrics", self._metrics),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_level="critical", lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self.reset()
        self._thread.start()

    def reset(self) -> None:
        self.models: Any = {"data": [{"id": "scripted"}, {"id": "other"}]}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.behave: Callable[[int], str] = lambda index: "normal"
        self.refused_fields: tuple[str, ...] = ()
        self.reports_usage = True
        self.cached_tokens: int | None = None
        self.metrics: list[str] = []
        """What /metrics answers, one a request; none is 404."""
        self.release_at = 0
        """Measured requests that must be in flight at once before any of them is answered; 0 answers at once."""
        self.reached = threading.Event()
        """Set when a request with the behaviour "hang" has arrived."""
        self.measured = 0
        self._released: asyncio.Event | None = None

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    @property
    def measured_bodies(self) -> list[dict[str, Any]]:
        return [body for body in self.bodies if body["max_tokens"] != PROBE_MAX_TOKENS]

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.metrics.pop(0)) if self.metrics else Response(status_code=404)

    async def _models(self, request: Request) -> Response:
        return JSONResponse(self.models)

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.url.path)
        for field in self.refused_fields:
            if field in body:
                return JSONResponse({"error": {"message": f"Unrecognized request argument: {field}"}}, 400)
        behaviour = "normal"
        if body["max_tokens"] != PROBE_MAX_TOKENS:
            behaviour = self.behave(self.measured)
            self.measured += 1
            await self._hold()
        if behaviour == "http 503":
            return JSONResponse({"error": {"message": "no room", "type": "overloaded"}}, 503)
        return StreamingResponse(self._stream(body, behaviour), media_type="text/event-stream")

    async def _hold(self) -> None:
        if not self.release_at:
            return
        if self._released is None:
            self._released = asyncio.Event()
        if self.measured >= self.release_at:
            self._released.set()
        await self._released.wait()

    async def _stream(self, body: dict[str, Any], behaviour: str) -> AsyncIterator[bytes]:
        is_chat = "messages" in body
        if behaviour == "hang":
            self.reached.set()
            await asyncio.Event().wait()
        yield b": comment\r\n\r\n"
        if is_chat:
            yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for position in range(body["max_tokens"]):
            if position == 2 and behaviour == "mid-stream error":
                yield _event({"error": {"message": "the engine fell over", "code": 500}})
                return
            if position == 2 and behaviour == "cut":
                raise ConnectionResetError("scripted")
            if position == 2 and behaviour == "malformed":
                yield b"data: {not json\n\n"
                return
            choice = {"delta": {"content": " w"}} if is_chat else {"text": " w"}
            whole = _event({"choices": [{"index": 0, "finish_reason": None, **choice}]})
            yield whole[:9]
            yield whole[9:]
        last = {"delta": {}} if is_chat else {"text": ""}
        reason = "stop" if behaviour == "stop" else "length"
        yield _event({"choices": [{"index": 0, "finish_reason": reason, **last}]})
        if self.reports_usage and body.get("stream_options", {}).get("include_usage"):
            yield _event({"choices": [], "usage": self._usage(body)})
        yield b"data: [DONE]\n\n"

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        text = body.get("prompt") or " ".join(message["content"] for message in body["messages"])
        usage = {
            "prompt_tokens": BASE_TOKENS + TOKENS_PER_WORD * len(text.split()),
            "completion_tokens": body["max_tokens"],
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


@pytest.fixture(scope="session")
def _shared_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def server(_shared_server: ScriptedServer) -> ScriptedServer:
    _shared_server.reset()
    return _shared_server


class _InstantSelector(selectors.SelectSelector):
    """Never waits: it moves the loop's time on instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("every task waits for something that nothing will do")
        self.now += max(0.0, timeout)
        return super().select(0)


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._instant = _InstantSelector()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.now


@pytest.fixture
def virtual_time() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine on an event loop where sleeping takes no time and the clock starts at 0."""

    def run(main: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
            return runner.run(main)

    return run
