"""C50: a real process, real signals: drain, time-out, second signal, and starts that fail."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from castline.engines.errors import EngineError
from castline.server.app import Server
from castline.server.options import ServerOptions
from castline.server.proto import castline_pb2 as pb
from castline.server.proto import castline_pb2_grpc

SCRIPT = Path(__file__).with_name("fake_server.py")
REPLY = "Paris, naïve 🙂."
EXIT_S = 60


class Process:
    """A serving process and two clients of it."""

    def __init__(self, **options: Any) -> None:
        command = [sys.executable, str(SCRIPT), json.dumps(options)]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        word, url, address = self.read_line().split()
        assert word == "listening"
        self.http = httpx.Client(base_url=url, timeout=60)
        self.channel = grpc.insecure_channel(address.removeprefix("grpc://"))
        self.inference = castline_pb2_grpc.InferenceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def read_line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline()

    def wait(self) -> int:
        return self.popen.wait(EXIT_S)

    def close(self) -> str:
        """Ends what still runs; what the process logged."""
        self.http.close()
        self.channel.close()
        if self.popen.poll() is None:
            self.popen.kill()
        return self.popen.communicate()[1]


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[Process]:
    process = Process(**options)
    try:
        assert process.read_line() == "ready\n"
        yield process
    finally:
        process.close()


@contextlib.contextmanager
def http_stream(process: Process) -> Iterator[Iterator[str]]:
    """The lines of a streamed completion, of which the first chunk has arrived."""
    body = {"prompt": "a", "stream": True, "max_tokens": None}
    with process.http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        assert '"P"' in next(lines)
        yield lines


def grpc_stream(process: Process) -> Any:
    """A Generate call of which the first message has arrived."""
    call = process.inference.Generate(pb.GenerateRequest(prompt="a"))
    assert next(call).text == "P"
    return call


def ready_status(process: Process) -> int:
    return process.http.get("/health/ready").status_code


def wait_until_not_ready(process: Process) -> None:
    while ready_status(process) == 200:
        pass


def text_of(lines: Iterator[str]) -> str:
    """The text of the rest of a stream that ends as it should."""
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_drain() -> None:
    """Prevents streams that are cut by a rolling update, and new work for a server that is about to end."""
    with serving(hold_after=2) as process, http_stream(process) as one, http_stream(process) as two:
        three = grpc_stream(process)
        process.popen.send_signal(signal.SIGTERM)
        wait_until_not_ready(process)
        body = process.http.get("/health/ready").json()
        assert body["status"] == "draining"
        assert "drain" in body["reason"]
        assert process.http.get("/health/live").status_code == 200
        assert (
            process.health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        )
        refused = process.http.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in refused.headers
        with pytest.raises(grpc.RpcError) as unavailable:
            next(process.inference.Generate(pb.GenerateRequest(prompt="a")))
        assert unavailable.value.code() is grpc.StatusCode.UNAVAILABLE
        process.popen.send_signal(signal.SIGUSR1)
        assert text_of(one) == text_of(two) == REPLY[1:]
        assert "".join(response.text for response in three) == REPLY[1:]
        assert process.wait() == 0


@pytest.mark.parametrize("hangs_in_drain", [False, True], ids=["engine-ends-them", "engine-hangs"])
def test_drain_times_out(hangs_in_drain: bool) -> None:
    """Prevents a process that never ends, and streams that end without a word, even when the engine hangs."""
    options = {"hold_after": 2, "drain_timeout_s": 0.2, "hangs_in_drain": hangs_in_drain}
    with serving(**options) as process, http_stream(process) as one:
        two = grpc_stream(process)
        process.popen.send_signal(signal.SIGTERM)
        events = [line for line in one if line]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        with pytest.raises(grpc.RpcError) as ended:
            list(two)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert process.wait() == 0


def test_second_signal_ends_at_once() -> None:
    """Prevents an operator from having to wait for the drain, or to look for kill -9."""
    with serving(hold_after=2) as process, http_stream(process):
        process.popen.send_signal(signal.SIGTERM)
        wait_until_not_ready(process)
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM


def test_idle_server_ends_cleanly_on_ctrl_c() -> None:
    """Prevents a traceback, or a wait for connections that are only kept alive."""
    process = Process()
    assert process.read_line() == "ready\n"
    assert ready_status(process) == 200, "this connection stays open"
    process.popen.send_signal(signal.SIGINT)
    assert process.wait() == 0
    assert "Traceback" not in process.close()


def test_signal_while_starting() -> None:
    """Prevents a start that cannot be interrupted."""
    process = Process(never_opens=True)
    assert process.http.get("/health/ready").json()["status"] == "starting"
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert "Traceback" not in process.close()


def test_an_engine_that_does_not_load_ends_the_process() -> None:
    """C01: prevents a server that stays up without an engine. One message, no traceback."""
    process = Process(does_not_load=True)
    assert process.wait() == 1
    log = process.close()
    assert "castline: the bundle is damaged" in log
    assert "Traceback" not in log


def test_an_engine_that_fails_for_good_ends_the_process() -> None:
    """Prevents a server that answers 500 until somebody notices; a supervisor restarts what exits."""
    process = Process()
    assert process.read_line() == "ready\n"
    process.popen.send_signal(signal.SIGUSR2)
    assert process.wait() == 1
    assert "the engine has failed" in process.close()


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_a_taken_port_is_named(app: Any, transport: str) -> None:
    """Prevents two servers that share a port and get half of the requests each."""
    port = int(getattr(app.server.endpoints, transport).rpartition(":")[2])

    async def start() -> None:
        Server(ServerOptions(**{"http_port": 0, "grpc_port": 0, f"{transport}_port": port}))

    with pytest.raises(EngineError, match=f"{port}.*--{transport}-port"):
        app.call(start()).result(10)


def test_a_server_that_sleeps_hears_that_it_is_to_stop() -> None:
    """An idle HTTP server waits for nothing else; polling for the end would keep it awake."""

    async def listen_and_close() -> None:
        server = Server(ServerOptions(http_port=0, grpc_port=0))
        await server.listen()
        async with httpx.AsyncClient() as client:
            assert "date" in (await client.get(f"{server.endpoints.http}/health/live")).headers
        async with asyncio.timeout(30):
            await server.close()

    asyncio.run(listen_and_close())
