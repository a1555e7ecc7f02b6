"""How a job is run inside a process: on an engine that batches continuously, or in static batches."""

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from benchmarks.drivers.protocol import Job, Request, Track, encode_tracks


class OutOfTime(Exception):
    """The job took longer than it may."""


class ContinuousEngine(Protocol):
    """An engine that takes requests between its steps."""

    def add(self, key: int, request: Request) -> None:
        """Queues a request; it is to give exactly ``max_tokens`` tokens."""
        ...

    def step(self) -> Iterable[tuple[int, int, bool]]:
        """One step: (key, new tokens, whether it has ended) of the requests that moved."""
        ...


def run_continuous(engine: ContinuousEngine, message: dict[str, Any]) -> dict[str, Any]:
    """A closed loop; the late request joins when every other one under way has ``late_after`` tokens."""
    job = Job.decode(message)
    waiting = list(enumerate(job.requests))
    late_key = len(job.requests)
    tracks: dict[int, Track] = {}
    running: set[int] = set()
    begun = time.monotonic()

    def start(key: int, request: Request) -> None:
        now = time.monotonic()
        tracks[key] = Track(due=now, started=now)
        engine.add(key, request)
        running.add(key)

    while waiting or running:
        while waiting and len(running - {late_key}) < job.concurrency:
            start(*waiting.pop(0))
        if job.late and late_key not in tracks and all(tracks[key].tokens >= job.late_after for key in running):
            start(late_key, job.late)
        for key, new_tokens, ended in engine.step():
            now = time.monotonic()
            if new_tokens:
                tracks[key].add(now, new_tokens)
            if ended:
                tracks[key].ended = now
                running.discard(key)
        if time.monotonic() - begun > job.limit_s:
            raise OutOfTime(f"not done within {job.limit_s:g} s")
    late = tracks.pop(late_key, None)
    return encode_tracks(begun, [tracks[key] for key in sorted(tracks)], late)


OnStep = Callable[[], None]
"""Called after each step of a static batch: every sequence has one token more. Raises to end it."""


def run_static(generate: Callable[[list[Request], OnStep], None], message: dict[str, Any]) -> dict[str, Any]:
    """Batches of *concurrency* requests in order, each padded to its longest prompt and run to its longest answer.

    A request has ended when it has its own ``max_tokens``; the next batch waits for the longest.
    """
    job = Job.decode(message)
    begun = time.monotonic()
    tracks: list[Track] = []
    for first in range(0, len(job.requests), job.concurrency):
        batch = job.requests[first : first + job.concurrency]
        now = time.monotonic()
        group = [Track(due=now, started=now) for _ in batch]

        def on_step(batch: list[Request] = batch, group: list[Track] = group) -> None:
            now = time.monotonic()
            for request, track in zip(batch, group, strict=True):
                if track.tokens < request.max_tokens:
                    track.add(now)
            if now - begun > job.limit_s:
                raise OutOfTime(f"not done within {job.limit_s:g} s")

        generate(batch, on_step)
        tracks += group
    return encode_tracks(begun, tracks, None)
