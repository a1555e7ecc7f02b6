"""The engine as both transports call it: the same EngineClient, with every request timed and counted on the way.

It also knows which requests wait for the engine right now, and can end them when the engine itself will not.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import cast

from castline.engines.errors import ErrorCode, RequestError
from castline.runtime.client import EngineClient, Express, Health, Output, Stats
from castline.runtime.sampling_params import SamplingParams
from castline.server.metrics import Metrics, RequestMeter


def shutting_down() -> RequestError:
    return RequestError("the server is shutting down; send the request to another", code=ErrorCode.SHUTTING_DOWN)


class MeteredEngine(EngineClient):
    """An EngineClient over another. Never counts a request twice, and never delays an output."""

    def __init__(self, engine: EngineClient, metrics: Metrics) -> None:
        self.manifest = engine.manifest
        self.limits = engine.limits
        self.tokenizer = engine.tokenizer
        self._engine = engine
        self._metrics = metrics
        self._awaiting: set[asyncio.Task[object]] = set()
        """Tasks that wait for an output at this moment; not those that wait for a slow client."""
        self._draining = False
        self._terminated = False

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        add_special_tokens: bool = True,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        express: Express | None = None,
        streams: bool = True,
    ) -> AsyncIterator[Output]:
        meter = RequestMeter(self._metrics, params.n)
        error: BaseException | None = None
        try:
            if self._draining:
                raise shutting_down()
            outputs = self._engine.generate(
                prompt,
                params,
                request_id=request_id,
                add_special_tokens=add_special_tokens,
                timeout_s=timeout_s,
                cache_salt=cache_salt,
                express=None if express is None else _metered(express, meter),
                streams=streams,
            )
            async with aclosing(cast(AsyncGenerator[Output, None], outputs)):
                while (output := await self._next(outputs)) is not None:
                    meter.observe(output)
                    yield output
        except BaseException as raised:
            error = raised
            raise
        finally:
            meter.close(error)

    async def _next(self, outputs: AsyncIterator[Output]) -> Output | None:
        """The next output, or None at the end. ``terminate`` turns the wait into an error."""
        task = cast("asyncio.Task[object]", asyncio.current_task())
        self._awaiting.add(task)
        try:
            return await anext(outputs, None)
        except asyncio.CancelledError:
            if not self._terminated:
                raise
            task.uncancel()
            raise shutting_down() from None
        finally:
            self._awaiting.discard(task)

    def health(self) -> Health:
        return self._engine.health()

    def watch_health(self, changed: Callable[[], None]) -> None:
        self._engine.watch_health(changed)

    def stats(self) -> Stats:
        return self._engine.stats()

    def stream_interval(self) -> int:
        return self._engine.stream_interval()

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        await self._engine.drain(timeout_s)

    def terminate(self) -> None:
        """Ends every request that still waits, with SHUTTING_DOWN, though the engine does not answer."""
        self._draining = self._terminated = True
        for task in list(self._awaiting):
            task.cancel()


def _metered(express: Express, meter: RequestMeter) -> Express:
    def metered(output: Output) -> bool:
        if not express(output):
            return False
        meter.observe(output)
        return True

    return metered
