"""The engine core as the loop around it sees it: token ids in, events out, one step at a time, no threads."""

from typing import Protocol

from castline.runtime.client import Stats
from castline.runtime.events import SequenceEvent
from castline.runtime.request import Request


class EngineCore(Protocol):
    """Not thread-safe: one loop owns it. castline.runtime.core implements it over scheduler, executor and sampler."""

    report_interval: int
    """Tokens of a continuation that make an event; its first event may have fewer, and its last."""

    @property
    def has_work(self) -> bool: ...

    def add_request(self, request: Request) -> None:
        """Queues a validated request. Never raises for what a request holds."""
        ...

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends one continuation, or all; unknown ids are ignored. The next step reports FinishReason.ABORT for each."""
        ...

    def step(self) -> list[SequenceEvent]:
        """One forward pass. A failed step is rolled back and ends only the sequences it concerns, with an error."""
        ...

    def stats(self) -> Stats: ...
