"""Both transports in one process, on one event loop, over one engine; from listening to drained.

HTTP and gRPC listen before the engine has loaded, so that health can be asked from the start; every other request is
told that the server is not ready.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from types import FrameType

import uvicorn

from castline.engines.errors import EngineError
from castline.runtime.client import EngineClient, Phase
from castline.server.grpc_service import GrpcServer
from castline.server.http_app import http_app
from castline.server.http_protocol import Connection
from castline.server.options import Endpoints, ServerOptions
from castline.server.serving import ServedModel, Serving

log = logging.getLogger(__name__)

LAST_WORDS_S = 0.4
"""Time that ended requests have to send their last message, though the drain time is over."""
YOUNG_OBJECTS = 10_000
"""That come to be between two collections. Python's 700 is a few tokens of 64 streams: all of their objects were walked
again and again, for a twentieth of the CPU time of a token."""
ENGINE_GRACE_S = 0.2
"""Time after the drain time in which the engine must have ended what still ran; then the server does it."""


class _Uvicorn(uvicorn.Server):
    """Signals are this process's business, not the HTTP server's, and an idle server sleeps."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Uvicorn's own wakes up ten times a second, to look for its end and to tell the date, which is Connection's
        job.
        """
        await self._stop.wait()

    def stop(self) -> None:
        self.should_exit = True
        self._stop.set()


class Server:
    """``listen``, then ``open`` when the engine has loaded, ``drain`` and ``close``; made on the running loop."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.serving = Serving()
        self._socket = _bind(options.host, options.http_port)
        try:
            self._grpc = GrpcServer(self.serving, options.host, options.grpc_port)
        except RuntimeError:
            self._socket.close()
            raise EngineError(
                f"cannot listen on {options.host}:{options.grpc_port}; choose another with --host and --grpc-port"
            ) from None
        config = uvicorn.Config(
            http_app(self.serving),
            http=Connection,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )
        self._uvicorn = _Uvicorn(config)
        self._tasks: list[asyncio.Task[None]] = []
        self._health_changed = asyncio.Event()
        self.failed = asyncio.Event()
        """Set when the engine has failed for good."""
        self._drain_deadline = monotonic()
        host = f"[{options.host}]" if ":" in options.host else options.host
        http_port = self._socket.getsockname()[1]
        self.endpoints = Endpoints(f"http://{host}:{http_port}", f"grpc://{host}:{self._grpc.port}")

    async def listen(self) -> None:
        """Both transports answer when this returns."""
        await self._grpc.start()
        self._tasks.append(asyncio.create_task(self._uvicorn.serve(sockets=[self._socket])))
        self._tasks.append(asyncio.create_task(self._follow_health()))

    async def _follow_health(self) -> None:
        """A health service that is watched must be told of a change."""
        while True:
            await self._health_changed.wait()
            self._health_changed.clear()
            await self._grpc.publish_health()
            if self.serving.live().phase is Phase.FAILED:
                self.failed.set()

    async def open(self, engine: EngineClient) -> ServedModel:
        """The engine has loaded; returns when it is ready. Raises EngineError where it fails instead."""
        changed = asyncio.Event()

        def on_change() -> None:
            changed.set()
            self._health_changed.set()

        engine.watch_health(on_change)
        model = self.serving.open(engine, self._options.model_name)
        while not (health := engine.health()).ready:
            if health.phase is Phase.FAILED:
                raise EngineError(health.reason)
            changed.clear()
            await changed.wait()
        await self._grpc.publish_health()
        return model

    async def drain(self) -> None:
        """Not ready from now on. Returns when every request has ended, at the latest soon after the drain time."""
        timeout_s = self._options.drain_timeout_s
        self._drain_deadline = monotonic() + timeout_s
        log.info("draining: up to %g s for the requests that run", timeout_s)
        self.serving.begin_drain()
        await self._grpc.publish_health()
        if not self.serving.is_open:
            return
        engine = self.serving.model.engine
        try:
            async with asyncio.timeout(timeout_s + ENGINE_GRACE_S):
                await engine.drain(timeout_s)
        except TimeoutError:
            engine.terminate()

    async def close(self) -> None:
        """Answers that are complete are sent to slow readers until the drain time is over; then connections are cut."""
        grace_s = max(LAST_WORDS_S, self._drain_deadline - monotonic())
        self._uvicorn.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]  # any number of seconds
        self._uvicorn.stop()
        http, health = self._tasks
        health.cancel()
        await asyncio.gather(http, self._grpc.stop(grace_s), health, return_exceptions=True)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise EngineError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another with --host and --http-port"
        ) from None
    # asyncio sets it only on sockets made with an explicit IPPROTO_TCP; without it a small answer waits about 40 ms for
    # the reader's delayed ACK. Accepted sockets inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@contextmanager
def _stop_on_signal() -> Iterator[asyncio.Event]:
    """An event that the first SIGTERM or SIGINT sets. A second one ends the process at once."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    num_received = 0

    def received(number: int, frame: FrameType | None) -> None:
        nonlocal num_received
        num_received += 1
        if num_received > 1:
            os._exit(128 + number)
        loop.call_soon_threadsafe(stop.set)

    previous = {number: signal.signal(number, received) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


async def serve(
    open_engine: Callable[[], Awaitable[EngineClient]],
    options: ServerOptions,
    *,
    on_listening: Callable[[Endpoints], None],
    on_ready: Callable[[ServedModel, Endpoints], None],
) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Call it on the main thread.

    Raises EngineError where a port is taken, or the engine does not load or fails for good.
    """

    async def run(server: Server) -> None:
        model = await server.open(await open_engine())
        gc.freeze()  # what lives for ever is not walked again: a full collection would pause every stream
        gc.set_threshold(YOUNG_OBJECTS)
        on_ready(model, server.endpoints)
        await server.failed.wait()
        raise EngineError(f"the engine has failed: {model.engine.health().reason}")

    with _stop_on_signal() as stop:
        async with _listening(options) as server:
            on_listening(server.endpoints)
            await _until(stop, run(server))


async def _until(stop: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    """Runs *work*; returns when *stop* is set, though the work is not done. Raises what the work raises."""
    tasks = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _listening(options: ServerOptions) -> AsyncIterator[Server]:
    server = Server(options)
    await server.listen()
    try:
        yield server
    finally:
        await server.drain()
        await server.close()
