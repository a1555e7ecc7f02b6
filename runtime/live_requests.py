"""The requests that have no outcome yet, each with the task that reads it: reports in, outputs out.

A request is here from the moment it is sent to the engine until its one outcome is known: all continuations finished,
or one error. What the engine still says of a request that is no longer here is dropped.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from castline.engines.errors import CastlineError, EngineError, ErrorCode, RequestError
from castline.runtime.client import Express
from castline.runtime.events import SequenceEvent
from castline.runtime.live_request import LiveRequest
from castline.runtime.output_processor import OutputProcessor
from castline.runtime.request import Request
from castline.runtime.stall_watch import StallWatch
from castline.runtime.stream_interval import StreamInterval
from castline.runtime.tokenizer import Tokenizer
from castline.runtime.wire import Abort, Command, Pace

LAST_TOKENS_S: Final = 0.15
"""What the engine process may take to hand over the tokens that it holds of a request that is cut off: a step or two.
It is less than what a server gives a drain beyond its time."""

_log = logging.getLogger(__name__)


class LiveRequests(Mapping[str, LiveRequest]):
    """By id. All methods are called from one event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        interval: StreamInterval,
        stall: StallWatch,
        send: Callable[[Command], None],
        clock: Callable[[], float],
    ) -> None:
        """*send* takes what the engine loop is to be told; *clock* is that loop's."""
        self.num_continuations = 0
        """Of all, that have not ended."""
        self._live: dict[str, LiveRequest] = {}
        self._processor = OutputProcessor(tokenizer)
        self._interval = interval
        self._pace = 1
        """What the engine loop was told last."""
        self._stall = stall
        self._send = send
        self._clock = clock
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def __getitem__(self, request_id: str) -> LiveRequest:
        return self._live[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request: Request, express: Express | None) -> LiveRequest:
        """Before the engine loop has it."""
        live = LiveRequest(request.request_id, request.params.n, express, self._interval)
        self._processor.add(request)
        if not self._live:
            self._all_ended.clear()
            self._stall.begin()
            self._interval.begin()
        self._keep_pace()
        self._live[request.request_id] = live
        self.num_continuations += live.num_places
        if request.deadline is not None:
            live.timer = asyncio.get_running_loop().call_later(
                request.deadline - self._clock(), self.cut_off, live, _deadline_exceeded()
            )
        return live

    def progressed(self, events: Sequence[SequenceEvent]) -> None:
        """The engine loop goes on, and has *events* to report."""
        self._stall.progressed()
        self._interval.progressed(len(self._live))
        self._keep_pace()
        self._deliver(events)

    async def wait_for_end(self) -> None:
        """Until there is none."""
        await self._all_ended.wait()

    def cut_off(self, live: LiveRequest, error: CastlineError) -> None:
        """Ends a request early, with *error* behind the tokens that the engine process still holds of it.

        An engine that does not hand them over within LAST_TOKENS_S keeps them.
        """
        live.cut_off_with = error
        self._send(Abort(live.request_id))
        if live.timer is not None:
            live.timer.cancel()
        live.timer = asyncio.get_running_loop().call_later(LAST_TOKENS_S, self.end, live, error)

    def end(self, live: LiveRequest, error: CastlineError | None = None) -> None:
        """Ends a request early, with *error* for its reader if it has one. A request that has ended is left alone."""
        if self._forget(live):
            self._send(Abort(live.request_id))
            if error is not None:
                live.fail(error)

    def _keep_pace(self) -> None:
        """Tokens that no message can have yet stay in the engine process: what crosses is what the readers get."""
        if self._interval.tokens != self._pace:
            self._pace = self._interval.tokens
            self._send(Pace(self._pace))

    def _deliver(self, events: Sequence[SequenceEvent]) -> None:
        """A fault in handing an output over ends the one request, never the link that serves all."""
        step = self._processor.process(events)
        for request_id, output in step.outputs:
            live = self._live.get(request_id)
            if live is None:
                continue
            try:
                live.keep(output)
            except Exception as error:
                _log.exception("request %s", request_id)
                self.end(live, EngineError(f"internal error: {error!r}"))
                continue
            if output.finish_reason is not None:
                self._free_places(live, live.num_unfinished)
                if live.num_unfinished == 0:
                    self._forget(live)
        for request_id, index in step.aborts:
            self._send(Abort(request_id, index))
        for request_id, failure in step.failures:
            live = self._live.get(request_id)
            if live is not None:
                live.fail(live.cut_off_with or failure)
                self._forget(live)

    def _forget(self, live: LiveRequest) -> bool:
        """Whether it was still there."""
        if live.timer is not None:
            live.timer.cancel()
        self._processor.remove(live.request_id)
        self._free_places(live, 0)
        known = self._live.pop(live.request_id, None) is not None
        if known and not self._live:
            self._all_ended.set()
            self._stall.end()
            self._interval.end()
        return known

    def _free_places(self, live: LiveRequest, num_left: int) -> None:
        """Of its continuations that have ended; *num_left* go on."""
        self.num_continuations -= live.num_places - num_left
        live.num_places = num_left


def _deadline_exceeded() -> RequestError:
    return RequestError("the request did not finish before its deadline", code=ErrorCode.DEADLINE_EXCEEDED)
