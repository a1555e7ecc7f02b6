"""A started system: behind HTTP, or a driver inside the peer's environment. Both run the same jobs.

``started_in`` is W7: from the start of the process to the first token of a tiny request, which is sent as soon as the
system takes one.
"""

import asyncio
import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from benchmarks.errors import JobFailed, Unavailable
from benchmarks.figures import Outcome
from benchmarks.processes import Group
from benchmarks.settings import ROOT
from benchmarks.workloads import SAMPLING, Job, Request
from castline.server.bench.client import Client, RequestRecord
from castline.server.bench.connection import allow_connections
from castline.server.bench.loops import Trace, closed_loop
from castline.server.bench.protocol import BodyOptions, RequestSpec

START_TIMEOUT_S = 240.0
POLL_S = 0.005
TINY = Request(prompt=(504, 253, 1343, 282), max_tokens=1)
"""The request of W7; any four tokens."""


class Session(ABC):
    """One started system. Not for concurrent use."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.started_in = 0.0

    @abstractmethod
    def run(self, job: Job, limit_s: float) -> Outcome:
        """Raises JobFailed where the system ended, or took longer than *limit_s*."""

    @abstractmethod
    def answer(self, prompt: Sequence[int], max_tokens: int) -> str | list[int]:
        """A greedy answer to a prompt: its text, or its tokens where the system gives those. Raises JobFailed."""

    def stop(self) -> None:
        self.group.stop()

    @contextlib.contextmanager
    def stopped_on_failure(self) -> Iterator[None]:
        """Of a start: nothing is left running where it fails. Raises Unavailable in the place of JobFailed."""
        try:
            yield
        except JobFailed as error:
            self.stop()
            raise Unavailable(f"does not start: {error}") from None
        except BaseException:
            self.stop()
            raise

    def _note_first_token(self, begun: float) -> None:
        record = self.run(Job((TINY,), concurrency=1), START_TIMEOUT_S).records[0]
        if record.first_token is None:
            raise JobFailed(record.failure.message if record.failure else "its answer is empty")
        self.started_in = record.first_token - begun

    def _died(self) -> JobFailed:
        return JobFailed(f"the process ended: {self.group.last_words() or 'it said nothing'}")


class HttpSession(Session):
    """An OpenAI-compatible server, loaded over loopback by the client of ``castline bench``."""

    def __init__(self, group: Group, url: str, model: str) -> None:
        super().__init__(group)
        self.url = url
        self.model = model

    @classmethod
    def start(
        cls,
        command: Callable[[int], Sequence[str]],
        *,
        ready_path: str,
        model: str,
        log: Path,
        environment: Mapping[str, str],
        timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """*command* takes the port to listen on. Raises Unavailable where no token comes in time."""
        port = _free_port()
        begun = time.monotonic()
        session = cls(Group.start(command(port), log, environment), f"http://127.0.0.1:{port}", model)
        with session.stopped_on_failure():
            session._wait_until_ready(begun, ready_path, timeout_s)
            session._note_first_token(begun)
        return session

    def run(self, job: Job, limit_s: float) -> Outcome:
        try:
            return asyncio.run(_load(self.url, self.model, job, limit_s))
        except TimeoutError:
            raise (JobFailed(f"not done within {limit_s:g} s") if self.group.alive else self._died()) from None

    def answer(self, prompt: Sequence[int], max_tokens: int) -> str:
        return str(self.complete(prompt, max_tokens)["text"])

    def complete(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        """The only choice of a greedy completion. *fields*: further ones of the request. Raises JobFailed."""
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, **fields}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                choice: dict[str, Any] = json.load(response)["choices"][0]
        except (OSError, LookupError, ValueError) as error:
            raise JobFailed(f"no answer over HTTP: {error}") from None
        return choice

    def _wait_until_ready(self, begun: float, path: str, timeout_s: float) -> None:
        while time.monotonic() - begun < timeout_s:
            if not self.group.alive:
                raise self._died()
            try:
                with urllib.request.urlopen(self.url + path, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(POLL_S)
        raise JobFailed(f"not ready within {timeout_s:g} s")


async def _load(url: str, model: str, job: Job, limit_s: float) -> Outcome:
    """Runs the job as a closed loop; the clock is the event loop's, which is ``time.monotonic``."""
    clock = asyncio.get_running_loop().time
    allow_connections(job.concurrency + 1)
    client = Client(url, None, limit_s)
    options = BodyOptions(model, "completions", *(SAMPLING if job.sampled else ()))
    received = [0] * len(job.requests)
    all_are_on = asyncio.Event()

    async def send(index: int, due: float) -> RequestRecord:
        def on_arrival() -> None:
            received[index] += 1
            if job.late and min(received[: job.concurrency]) >= job.late_after:
                all_are_on.set()

        return await client.send(index, _spec(job.requests[index]), options, due, on_arrival)

    async def send_late(request: Request) -> RequestRecord:
        await all_are_on.wait()
        return await client.send(len(job.requests), _spec(request), options, clock())

    trace = Trace()
    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
            late = group.create_task(send_late(job.late)) if job.late else None
            group.create_task(closed_loop(send, trace, job.concurrency, num_requests=len(job.requests)))
    finally:
        client.close()
    return Outcome(trace.begun, tuple(trace.records), late.result() if late else None)


def _spec(request: Request) -> RequestSpec:
    return RequestSpec(max_tokens=request.max_tokens, prompt=request.prompt)


class DriverSession(Session):
    """A program of `benchmarks.drivers` in the peer's environment. No HTTP: what the peer saves, its figures show."""

    @classmethod
    def start(cls, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> "DriverSession":
        """Raises Unavailable where no token comes."""
        begun = time.monotonic()
        session = cls.open(command, log=log, environment=environment)
        with session.stopped_on_failure():
            session._note_first_token(begun)
        return session

    @classmethod
    def open(cls, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> "DriverSession":
        """The process alone: it may still be loading, or fail to."""
        return cls(Group.start(command, log, driver_environment(environment), talks=True))

    def run(self, job: Job, limit_s: float) -> Outcome:
        return outcome_of(job, self.call("job", **job_fields(job, limit_s)))

    def answer(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        tokens: list[int] = self.call("generate", prompt=list(prompt), max_tokens=max_tokens)["tokens"]
        return tokens

    def call(self, do: str, **fields: Any) -> dict[str, Any]:
        """One exchange of `benchmarks.drivers.protocol`. Raises JobFailed."""
        stdin, stdout = self.group.process.stdin, self.group.process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        for line in stdout:
            if line.startswith(b"{"):  # else a library's greeting, from before the driver took the output over
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise JobFailed(answer["error"])
                return answer
        raise self._died()


def driver_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Drivers are found in the source tree, whatever the working directory."""
    return {"PYTHONPATH": str(ROOT), **extra}


def job_fields(job: Job, limit_s: float) -> dict[str, Any]:
    """A job as `benchmarks.drivers.protocol` has it, which knows no sampling."""
    assert not job.sampled
    return {
        "requests": [[list(request.prompt), request.max_tokens] for request in job.requests],
        "concurrency": job.concurrency,
        "late": [list(job.late.prompt), job.late.max_tokens] if job.late else None,
        "late_after": job.late_after,
        "limit_s": limit_s,
    }


def outcome_of(job: Job, answer: dict[str, Any]) -> Outcome:
    """From the answer to such a job."""
    records = [
        _record(i, request, t) for i, (request, t) in enumerate(zip(job.requests, answer["requests"], strict=True))
    ]
    late = _record(len(records), job.late, answer["late"]) if job.late and answer["late"] else None
    return Outcome(answer["begun"], tuple(records), late)


def _record(index: int, request: Request, track: dict[str, Any]) -> RequestRecord:
    arrivals: list[float] = track["arrivals"]
    return RequestRecord(
        index=index,
        scheduled=track["due"],
        started=track["started"],
        ended=track["ended"],
        first_token=arrivals[0] if arrivals else None,
        gaps=tuple(later - earlier for earlier, later in pairwise(arrivals)),
        prompt_tokens=len(request.prompt),
        output_tokens=track["tokens"],
        counted=True,
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Warmup:
    """Unmeasured: brings in code and caches before the first figure of a round."""

    prompts: tuple[tuple[int, ...], ...]

    def run(self, session: Session, limit_s: float) -> None:
        requests = tuple(Request(prompt, 8) for prompt in self.prompts)
        session.run(Job(requests[:1], concurrency=1), limit_s)
        session.run(Job(requests, concurrency=len(requests)), limit_s)
