"""One request between the engine loop and the task that reads it.

What a slow reader has not taken yet is merged, so that it holds one output for each continuation and never a queue.
"""

import asyncio

from castline.engines.errors import CastlineError
from castline.runtime.client import Express, Output
from castline.runtime.stream_interval import StreamInterval


class LiveRequest:
    """Filled as the engine reports, read by one task, both in one event loop."""

    def __init__(self, request_id: str, n: int, express: Express | None, interval: StreamInterval) -> None:
        """The reader gets *interval* tokens of a continuation at once, but its first as soon as it is there."""
        self.request_id = request_id
        self.timer: asyncio.TimerHandle | None = None
        """Fires at the deadline; once it is cut off, when the engine has had its time to hand over what it holds."""
        self.cut_off_with: CastlineError | None = None
        """Why the core was told to abort it: what its reader gets in place of the core's CANCELLED."""
        self.num_unfinished = n
        """Continuations that have no finish reason yet."""
        self.num_places = n
        """That it still takes of those for continuations."""
        self._express = express
        self._interval = interval
        self._begun: set[int] = set()
        """Continuations whose first token has gone to the reader."""
        self._gathered: dict[int, Output] = {}
        """Too few tokens yet."""
        self._unread: dict[int, Output] = {}
        self._error: CastlineError | None = None
        self._waiter: asyncio.Future[None] | None = None
        """The reader waits for it."""

    @property
    def ended(self) -> bool:
        return self._error is not None or self.num_unfinished == 0

    def keep(self, output: Output) -> None:
        """New output for the reader. Raises what *express* raises."""
        if (whole := self._gather(output)) is not None:
            self._hand_over(whole)

    def _gather(self, output: Output) -> Output | None:
        """What the reader is to get now, together with what was too little before."""
        index = output.index
        if index in self._gathered:
            output = merge(self._gathered.pop(index), output)
        if len(output.token_ids) < self._interval.tokens and index in self._begun and output.finish_reason is None:
            self._gathered[index] = output
            return None
        if output.token_ids:
            self._begun.add(index)
        return output

    def _hand_over(self, output: Output) -> None:
        if output.finish_reason is not None:
            self.num_unfinished -= 1
        elif self._express is not None and self._reader_waits and not self._unread and self._express(output):
            return
        earlier = self._unread.get(output.index)
        self._unread[output.index] = output if earlier is None else merge(earlier, output)
        self._wake()

    def fail(self, error: CastlineError) -> None:
        """The reader gets what there is, then *error*."""
        for index, output in self._gathered.items():
            self._unread[index] = merge(self._unread[index], output) if index in self._unread else output
        self._gathered.clear()
        self._error = error
        self._wake()

    async def next(self) -> Output | None:
        """The next output, None when every continuation has finished; raises the error of a request that failed."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self.ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._unread.pop(next(iter(self._unread)))

    @property
    def _reader_waits(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge(earlier: Output, later: Output) -> Output:
    """Two outputs of one continuation as one."""
    logprobs = None if later.logprobs is None else (earlier.logprobs or ()) + later.logprobs
    return Output(
        index=later.index,
        text=earlier.text + later.text,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=logprobs,
        finish_reason=later.finish_reason,
        stop_reason=later.stop_reason,
        prompt=earlier.prompt or later.prompt,
    )
