"""HTTP/1.1 over asyncio and llhttp: a client that costs microseconds a frame.

Frames of a body go straight from the socket's callback to the caller's, with no task woken and nothing queued: a
general client spends several times as long on a streamed token, and on a shared machine that time is the server's.
No redirects, no proxies, no compression: a benchmark wants the server itself.
"""

import asyncio
import resource
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from castline.server.bench.errors import BenchError

SPARE_FILES = 64

OnBody = Callable[[int, bytes], None]
"""Takes the response's status and a frame of its body. Must not raise."""


class Disconnected(Exception):
    """The server closed the connection before its answer was complete, or spoke no HTTP."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is. ``prefix`` goes before ``/v1``."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> "Address":
        """From ``http[s]://host[:port][/prefix][/v1]``. Raises BenchError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise BenchError(f"--url {url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchError(f"--url {url!r} is not the URL of a server; write it as http://HOST:PORT")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._on_body: OnBody | None = None
        self._done: asyncio.Future[int] | None = None
        self._status = 0
        self._says_length = False
        self._ends_with_connection = False
        self.reusable = False
        """The last exchange ended cleanly, and the server has not closed the connection since."""
        self.answered = False
        """A byte of the answer to the last request has come."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the connection is gone."""

    async def exchange(self, request: bytes, on_body: OnBody) -> int:
        """Sends one request and returns its status once the body is complete. Raises Disconnected."""
        assert self._transport is not None
        self._on_body = on_body
        self._done = asyncio.get_running_loop().create_future()
        self.reusable = self.answered = self._ends_with_connection = False
        self._transport.write(request)
        try:
            return await self._done
        finally:
            self._done = None
            self._on_body = None

    def close(self) -> None:
        """At once, so that a server notices that nobody listens."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server's answer is not HTTP/1.1: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self.closed.set_result(None)
        if self._ends_with_connection and error is None and self._done is not None and not self._done.done():
            self._done.set_result(self._status)
        else:
            self._fail(f"the server closed the connection before the end ({error or 'no reason given'})")

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(Disconnected(message))

    def on_message_begin(self) -> None:
        self._ends_with_connection = self._says_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._says_length = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._ends_with_connection = not self._says_length

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None:
            self._on_body(self._status, body)

    def on_message_complete(self) -> None:
        if 100 <= self._status < 200:
            return
        self.reusable = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._status)


class ConnectionPool:
    """Connections to one server, the last used first. As many as there are requests in flight."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._tls = ssl.create_default_context() if address.tls else None
        self._idle: list[Connection] = []

    async def exchange(self, request: bytes, on_body: OnBody) -> int:
        """One request over an idle connection or a new one. Raises Disconnected, or OSError where none can be made.

        A request is sent again only where an idle connection turns out to have been closed meanwhile, on which the
        server has seen nothing of it: llama.cpp's, for one, closes after every stream that it promised to keep alive.
        Otherwise a server that fails must be seen to fail.
        """
        idle = self._take_idle()
        if idle is not None:
            try:
                return await self._exchange(idle, request, on_body)
            except Disconnected:
                if idle.answered:
                    raise
        return await self._exchange(await self._connect(), request, on_body)

    async def _exchange(self, connection: Connection, request: bytes, on_body: OnBody) -> int:
        try:
            status = await connection.exchange(request, on_body)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return status

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self.address.host, self.address.port, ssl=self._tls)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def allow_connections(count: int) -> None:
    """Raises the soft limit of open files, as far as the system lets, to *count* connections and some files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
