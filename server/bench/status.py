"""Progress on standard error: one line that rewrites itself on a terminal, one line a point elsewhere.

Hand-made, because the client must be cheap: a line costs microseconds, and is drawn from the event loop's own timer.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from castline.server.bench.loops import Trace
from castline.server.bench.results import PointSummary
from castline.server.bench.settings import Point, load_label

REDRAW_S = 0.5
_CLEAR = "\r\x1b[2K"


class StatusLine:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()

    def show(self, text: str) -> None:
        """Replaces the line; nothing where it could not be replaced."""
        if self._is_terminal:
            self._stream.write(f"{_CLEAR}{text}")
            self._stream.flush()

    def clear(self) -> None:
        self.show("")

    def point_done(self, summary: PointSummary) -> None:
        """A line that stays."""
        self.clear()
        self._stream.write(
            f"{load_label(summary.mode, summary.load)}: {summary.completed} requests in {summary.duration_s:.1f} s, "
            f"{summary.failed} failed, {summary.output_token_throughput:.1f} output tok/s\n"
        )
        self._stream.flush()

    @contextmanager
    def watch(self, point: Point, trace: Trace) -> Iterator[None]:
        """Keeps the line up to date while the point runs."""
        if not self._is_terminal:
            yield
            return
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def redraw() -> None:
            nonlocal timer
            self.show(progress_text(point, trace, loop.time()))
            timer = loop.call_later(REDRAW_S, redraw)

        redraw()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            self.clear()


def progress_text(point: Point, trace: Trace, now: float) -> str:
    """The line of a point that is under way. Short: it must not wrap."""
    elapsed = now - trace.begun if trace.begun else 0.0
    failed = sum(record.failure is not None for record in trace.records)
    num_tokens = sum(record.output_tokens for record in trace.records if record.failure is None)
    goal = f"/{point.num_requests}" if point.num_requests is not None else ""
    time_goal = f"/{point.duration_s:g}" if point.duration_s is not None else ""
    rate = f", {num_tokens / elapsed:.0f} tok/s" if elapsed > 0 else ""
    failures = f", {failed} failed" if failed else ""
    return (
        f"{point.label}: {len(trace.records)}{goal} requests{failures}, {trace.in_flight} in flight, "
        f"{elapsed:.0f}{time_goal} s{rate}"
    )
