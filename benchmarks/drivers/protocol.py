"""JSON lines over standard input and output, between a driver and the session that started it.

==========  ======================================  =====================================================
"do"        further fields                          answer
==========  ======================================  =====================================================
job         requests [[prompt, max_tokens], …],     {"begun": t, "requests": [track, …], "late": track}
            concurrency, late, late_after, limit_s
generate    prompt, max_tokens                      {"tokens": [id, …]}: greedy, to the end of the text
logits      passages, path                          {"rows": n}; float32 [n, vocabulary] in path (.npy)
==========  ======================================  =====================================================

A track is {"due", "started", "ended", "arrivals": [t, …], "tokens": n}. Times are of ``time.monotonic``, which all
processes of a machine share. Whatever the peer prints goes to standard error. An answer {"error": text} is a failure.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

Handler = Callable[..., dict[str, Any]]

CHUNK_SIZES = (7, 1, 33, 16, 1, 64, 3, 48)
"""Tokens that a passage is fed at a time: as castline's own parity check feeds its engine."""


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Job:
    requests: list[Request]
    concurrency: int
    late: Request | None
    late_after: int
    limit_s: float

    @classmethod
    def decode(cls, message: dict[str, Any]) -> "Job":
        late = message["late"]
        return cls(
            requests=[Request(*pair) for pair in message["requests"]],
            concurrency=message["concurrency"],
            late=Request(*late) if late else None,
            late_after=message["late_after"],
            limit_s=message["limit_s"],
        )


@dataclass
class Track:
    """What one request did so far."""

    due: float
    started: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0

    def add(self, now: float, tokens: int = 1) -> None:
        self.arrivals.append(now)
        self.tokens += tokens
        self.ended = now


def chunks(passage: list[int]) -> list[list[int]]:
    """The passage in pieces of CHUNK_SIZES, in turn."""
    pieces, start, turn = [], 0, 0
    while start < len(passage):
        size = CHUNK_SIZES[turn % len(CHUNK_SIZES)]
        pieces.append(passage[start : start + size])
        start, turn = start + size, turn + 1
    return pieces


def encode_tracks(begun: float, tracks: list[Track], late: Track | None) -> dict[str, Any]:
    return {"begun": begun, "requests": [asdict(track) for track in tracks], "late": asdict(late) if late else None}


def own_output() -> TextIO:
    """Standard output for the protocol alone: what the peer's libraries print goes to standard error from here on."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def serve(channel: TextIO, handlers: dict[str, Handler]) -> None:
    """Answers each line until standard input closes. A failure is an answer too."""
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer = handlers[message.pop("do")](**message)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        channel.write(json.dumps(answer) + "\n")
