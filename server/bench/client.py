"""One streaming request, timed. Times are seconds of the event loop's clock, taken when a frame arrives.

The first token is the first chunk with text. After it, every chunk that carries a choice is an arrival, also one whose
text is empty (a token without text of its own); a closing chunk counts only where it brings text. Gaps between arrivals
are the inter-token latencies: on a server that sends several tokens in a chunk they are gaps between chunks.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from castline.server.bench.connection import Address, ConnectionPool, Disconnected
from castline.server.bench.protocol import (
    PATHS,
    BodyOptions,
    Chunk,
    RequestSpec,
    Usage,
    encode_body,
    error_text,
)
from castline.server.bench.sse import SseEvent, SseParser

MAX_ERROR_BODY = 65536
DONE = b"[DONE]"
_decode_chunk = msgspec.json.Decoder(Chunk).decode


@dataclass(frozen=True, slots=True)
class Failure:
    """``kind`` is one of: connect, timeout, http N, stream error, disconnected, malformed, no output."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What one request did. ``scheduled`` is when it was due, which a late client does not move."""

    index: int
    scheduled: float
    started: float
    ended: float
    first_token: float | None = None
    gaps: tuple[float, ...] = ()
    """Seconds between arrivals, the first token's excluded."""
    prompt_tokens: int | None = None
    """From usage; None where the server reports none."""
    cached_tokens: int | None = None
    """Of the prompt, read from the server's prefix cache; None where the server does not say."""
    output_tokens: int = 0
    counted: bool = False
    """``output_tokens`` is the server's usage, not a count of chunks."""
    finish_reason: str | None = None
    failure: Failure | None = None

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.scheduled

    @property
    def e2e(self) -> float:
        return self.ended - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Seconds an output token after the first; None for a single token."""
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.ended - self.first_token) / (self.output_tokens - 1)


class StreamReader:
    """The body of one response, as it arrives."""

    def __init__(self, clock: Callable[[], float], on_arrival: Callable[[], None] | None = None) -> None:
        self._clock = clock
        self._on_arrival = on_arrival
        self._sse = SseParser()
        self._error_body = b""
        self._is_done = False
        self.arrivals: list[float] = []
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.failure: Failure | None = None

    def on_body(self, status: int, frame: bytes) -> None:
        now = self._clock()
        if status != 200:
            self._error_body += frame[: MAX_ERROR_BODY - len(self._error_body)]
            return
        for event in self._sse.feed(frame):
            if self.failure is None and not self._is_done:
                self._take(event, now)

    def finish(self, status: int) -> None:
        """The response is complete: settles whether it was a success."""
        if status != 200:
            self.failure = Failure(f"http {status}", error_text(self._error_body))
        elif self.failure is None and not (self._is_done or self.finish_reason):
            what = "the stream ended without a finish_reason" if self.arrivals else "the answer is no stream of events"
            self.failure = Failure("malformed", what)
        elif self.failure is None and not self.arrivals and not (self.usage and self.usage.completion_tokens):
            self.failure = Failure("no output", "the stream ended without a token")

    def _take(self, event: SseEvent, now: float) -> None:
        if event.data == DONE:
            self._is_done = True
            return
        if event.event == b"error":
            self.failure = Failure("stream error", error_text(event.data))
            return
        try:
            chunk = _decode_chunk(event.data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.failure = Failure("malformed", f"an event is not a completion chunk: {error}")
            return
        if chunk.is_error:
            self.failure = Failure("stream error", error_text(event.data))
            return
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            if choice.has_text or (self.arrivals and choice.finish_reason is None):
                self.arrivals.append(now)
                if self._on_arrival is not None:
                    self._on_arrival()
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason


class Client:
    """Sends requests of one run to one server. A failed request is a record with a failure, never an exception."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self.address = Address.parse(url)
        self.timeout_s = timeout_s
        self._pool = ConnectionPool(self.address)
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises Disconnected, OSError, TimeoutError."""
        body = bytearray()
        async with asyncio.timeout(self.timeout_s):
            status = await self._pool.exchange(self._head("GET", path), lambda _, frame: body.extend(frame))
        return status, bytes(body)

    async def send(
        self,
        index: int,
        spec: RequestSpec,
        options: BodyOptions,
        scheduled: float,
        on_arrival: Callable[[], None] | None = None,
    ) -> RequestRecord:
        """One streaming completion, given up after the timeout. *scheduled* is on the event loop's clock.

        *on_arrival* is called at each arrival of text.
        """
        clock = asyncio.get_running_loop().time
        reader = StreamReader(clock, on_arrival)
        body = encode_body(spec, options)
        request = self._head("POST", PATHS[options.endpoint], len(body)) + body
        started = clock()
        try:
            async with asyncio.timeout(self.timeout_s):
                reader.finish(await self._pool.exchange(request, reader.on_body))
        except Disconnected as error:
            reader.failure = reader.failure or Failure("disconnected", str(error))
        except OSError as error:
            reader.failure = self._failure(error)
        return _record(index, scheduled, started, clock(), reader)

    def close(self) -> None:
        self._pool.close()

    def _failure(self, error: OSError) -> Failure:
        if is_own_timeout(error):
            return Failure("timeout", f"no complete answer within {self.timeout_s:g} s (--timeout)")
        return Failure("connect", connect_error(error, self.address))

    def _head(self, method: str, path: str, length: int | None = None) -> bytes:
        content = "" if length is None else f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
        return (
            f"{method} {self.address.prefix}{path} HTTP/1.1\r\n"
            f"Host: {self.address.authority}\r\n"
            f"User-Agent: castline-bench\r\nAccept: */*\r\n{self._authorization}{content}\r\n"
        ).encode()


def _record(index: int, scheduled: float, started: float, ended: float, reader: StreamReader) -> RequestRecord:
    arrivals, usage = reader.arrivals, reader.usage
    details = usage.prompt_tokens_details if usage else None
    return RequestRecord(
        index=index,
        scheduled=scheduled,
        started=started,
        ended=ended,
        first_token=arrivals[0] if arrivals else None,
        gaps=tuple(later - earlier for earlier, later in pairwise(arrivals)),
        prompt_tokens=usage.prompt_tokens if usage else None,
        cached_tokens=details.cached_tokens if details else None,
        output_tokens=usage.completion_tokens if usage else len(arrivals),
        counted=usage is not None,
        finish_reason=reader.finish_reason,
        failure=reader.failure,
    )


def is_own_timeout(error: OSError) -> bool:
    """Ours, not the system's: that one is a TimeoutError too, and has a number."""
    return isinstance(error, TimeoutError) and error.errno is None


def connect_error(error: OSError, address: Address) -> str:
    """Why no connection came about, in words."""
    if isinstance(error, ConnectionRefusedError):
        return f"connection to {address.authority} refused: nothing listens there"
    reason = error.strerror or str(error) or type(error).__name__
    return f"cannot reach {address.authority}: {reason}"
