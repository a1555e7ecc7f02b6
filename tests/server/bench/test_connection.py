"""The HTTP client against raw bytes: what servers may send, and when they may hang up."""

import asyncio

import pytest

from castline.server.bench.connection import Address, ConnectionPool, Disconnected

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
KEPT = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CLOSED = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
UNTIL_END = b"HTTP/1.1 404 Not Found\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + KEPT


class RawServer:
    """Answers the i-th request with the i-th of *answers*, and closes the connection where that one says so."""

    def __init__(self, *answers: bytes, closes: tuple[int, ...] = ()) -> None:
        self.answers = answers
        self.closes = closes
        self.num_connections = 0
        self.num_requests = 0
        self.hung_up = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                index = self.num_requests
                self.num_requests += 1
                writer.write(self.answers[index])
                await writer.drain()
                if index in self.closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()
        self.hung_up.set()


async def exchange_all(server: RawServer, count: int) -> list[tuple[int, bytes] | Exception]:
    """One request after the other over one pool; what each brought."""
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    pool = ConnectionPool(Address("127.0.0.1", port, False, ""))
    results: list[tuple[int, bytes] | Exception] = []
    for _ in range(count):
        body = bytearray()
        try:
            status = await pool.exchange(REQUEST, lambda _, frame, body=body: body.extend(frame))  # type: ignore[misc]
            results.append((status, bytes(body)))
        except Disconnected as error:
            results.append(error)
    pool.close()
    listener.close()
    return results


def run(count: int, *answers: bytes, closes: tuple[int, ...] = ()) -> tuple[list[tuple[int, bytes] | Exception], int]:
    async def main() -> tuple[list[tuple[int, bytes] | Exception], int]:
        server = RawServer(*answers, closes=closes)
        return await asyncio.wait_for(exchange_all(server, count), 60), server.num_connections

    return asyncio.run(main())


def test_a_kept_connection_is_used_again() -> None:
    """A new connection for each request would measure the handshake, and run a sweep out of ports."""
    assert run(3, KEPT, CHUNKED, KEPT) == ([(200, b"ok")] * 3, 1)


def test_a_closing_answer_ends_the_connection() -> None:
    """After ``Connection: close`` the next request goes over a new one."""
    assert run(2, CLOSED, KEPT) == ([(200, b"ok")] * 2, 2)


def test_a_body_that_ends_with_the_connection() -> None:
    """Without a length and without chunks, the end of the connection is the end of the body, and no failure."""
    assert run(2, UNTIL_END, KEPT, closes=(0,)) == ([(404, b"ok"), (200, b"ok")], 2)


def test_an_interim_answer_is_skipped() -> None:
    """100 Continue is no answer."""
    assert run(2, CONTINUED, KEPT) == ([(200, b"ok")] * 2, 1)


@pytest.mark.parametrize("answer", [b"", KEPT[:-1], CHUNKED[:-5], CHUNKED[:30], b"HTTP/1.1 200"])
def test_a_cut_answer_is_a_failure(answer: bytes) -> None:
    """A connection that ends before its answer does must fail the request and not be used again."""
    (first, second), connections = run(2, answer, KEPT, closes=(0,))
    assert isinstance(first, Disconnected)
    assert (second, connections) == ((200, b"ok"), 2)


def test_an_answer_that_is_not_http() -> None:
    """Named as such: somebody gave the port of another service."""
    (first, _), _ = run(2, b"SSH-2.0-OpenSSH_9\r\n", KEPT)
    assert isinstance(first, Disconnected)
    assert "not HTTP/1.1" in str(first)


def test_a_server_that_breaks_its_promise_to_keep_the_connection() -> None:
    """llama.cpp's server closes after every stream that it said it would keep alive: a third of its requests failed."""
    assert run(3, CHUNKED, CHUNKED, CHUNKED, closes=(0, 1, 2)) == ([(200, b"ok")] * 3, 3)


def test_a_server_that_fails_is_not_asked_twice() -> None:
    """An answer that has begun is never asked for again, nor one on a connection that was made for it."""
    (first, second), connections = run(2, KEPT, KEPT[:20], KEPT, closes=(1,))
    assert first == (200, b"ok")
    assert isinstance(second, Disconnected)
    assert connections == 1


def test_an_idle_connection_that_the_server_closed_is_replaced() -> None:
    """Servers close idle connections after seconds; at a low rate every request would otherwise fail."""

    async def main() -> None:
        server = RawServer(KEPT, KEPT, closes=(0,))
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        pool = ConnectionPool(Address("127.0.0.1", listener.sockets[0].getsockname()[1], False, ""))
        assert await pool.exchange(REQUEST, lambda *_: None) == 200
        await server.hung_up.wait()
        (idle,) = pool._idle
        await idle.closed
        assert await pool.exchange(REQUEST, lambda *_: None) == 200
        assert server.num_connections == 2
        pool.close()
        listener.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_cancelled_exchange_hangs_up() -> None:
    """A server frees what a request holds only when it sees that nobody listens."""

    async def main() -> None:
        server = RawServer(CHUNKED[:-5])
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        pool = ConnectionPool(Address("127.0.0.1", listener.sockets[0].getsockname()[1], False, ""))
        arrived = asyncio.Event()
        task = asyncio.create_task(pool.exchange(REQUEST, lambda *_: arrived.set()))
        await arrived.wait()
        task.cancel()
        await server.hung_up.wait()
        listener.close()

    asyncio.run(asyncio.wait_for(main(), 60))
