"""The engine inside an event loop: text in, text out, over an engine loop in a process of its own.

A request is in ``_live`` from the moment it is sent to the engine until its one outcome is known: all continuations
finished, or one error. What the engine still says of a request that is no longer there is dropped.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic
from typing import Final

from castline.engines.errors import CastlineError, EngineError, ErrorCode, RequestError
from castline.engines.manifest import Manifest
from castline.runtime.arrival_gate import ArrivalGate
from castline.runtime.client import EffectiveLimits, Express, Health, Output, Phase, Stats
from castline.runtime.engine_link import EngineLink, EngineProcess
from castline.runtime.events import SequenceEvent
from castline.runtime.intake import Intake
from castline.runtime.live_request import LiveRequest
from castline.runtime.loader import EnginePlan
from castline.runtime.output_processor import OutputProcessor
from castline.runtime.request import Request
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.stall_watch import StallWatch
from castline.runtime.step_profile import ProfileOptions
from castline.runtime.stream_interval import StreamInterval
from castline.runtime.tokenizer import Tokenizer, load_tokenizer
from castline.runtime.wire import Abort, Add, Command, Failed, Pace, Profile, Ready, Report, StepDone, Stop

STOP_GRACE_S: Final = 0.5
"""What a step in flight may take to end after Stop; then the engine process, which has nothing to save, is killed."""

PROFILE_GRACE_S: Final = 30.0
"""What an engine may take to end that has a profile to write."""

STALL_AFTER_S: Final = 30.0

LAST_TOKENS_S: Final = 0.15
"""What the engine process may take to hand over the tokens that it holds of a request that is cut off: a step or two.
It is less than what a server gives a drain beyond its time."""

_log = logging.getLogger(__name__)


class AsyncEngine:
    """Implements `castline.runtime.client.EngineClient`. All methods are called from one event loop."""

    def __init__(
        self,
        manifest: Manifest,
        limits: EffectiveLimits,
        tokenizer: Tokenizer,
        *,
        stall_after_s: float = STALL_AFTER_S,
        interval: StreamInterval | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """*clock* must be the engine loop's: deadlines cross on it.

        A continuation's outputs have at least *interval* tokens (None: 1), but for the first and the last.
        """
        self.manifest = manifest
        self.limits = limits
        self.tokenizer = tokenizer
        self._interval = interval or StreamInterval()
        self._stop_grace_s = STOP_GRACE_S
        self._clock = clock
        self._live: dict[str, LiveRequest] = {}
        self._processor = OutputProcessor(tokenizer)
        self._intake = Intake(tokenizer, manifest.model.vocab_size, limits, clock)
        self._pace = 1
        """What the engine loop was told last."""
        self._stats = Stats(kv_blocks_total=limits.num_blocks)
        self._health_changed: Callable[[], None] = _nobody_watches
        self._stall = StallWatch(stall_after_s, clock, lambda: self._health_changed())
        self._link: EngineLink | None = None
        self._gate: ArrivalGate | None = None
        self._process: EngineProcess | None = None
        self._ready = asyncio.Event()
        self._all_ended = asyncio.Event()
        self._draining = False
        self._stopping = False
        self._failure: str | None = None

    @classmethod
    async def start(
        cls,
        plan: EnginePlan,
        *,
        stall_after_s: float = STALL_AFTER_S,
        interval: StreamInterval | None = None,
        profile: ProfileOptions | None = None,
        loading: tuple[EngineProcess, socket.socket] | None = None,
    ) -> "AsyncEngine":
        """Loads and warms up the engine of *plan* in a process of its own; ready on return. Raises EngineError.

        *loading* is that process where `EngineProcess.load` has started it before, with the same *profile*.
        """
        process, connection = loading or EngineProcess.load(plan, profile)
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, plan.bundle)
        except BaseException:
            connection.close()
            process.kill()
            raise
        engine = cls(plan.manifest, plan.limits, tokenizer, stall_after_s=stall_after_s, interval=interval)
        if profile is not None:
            engine._stop_grace_s = PROFILE_GRACE_S
        await engine.connect(connection, process)
        return engine

    async def connect(self, connection: socket.socket, process: EngineProcess | None = None) -> None:
        """Takes over the socket to an engine loop, and waits until that is ready. Raises EngineError."""
        self._process = process
        exit_reason = process.exit_reason if process is not None else lambda: "the engine loop is gone"
        self._link = await EngineLink.connect(connection, self, exit_reason)
        self._gate = ArrivalGate(self._link.send, self.limits.max_num_batched_tokens)
        try:
            await self._ready.wait()
            if self._failure is not None:
                raise EngineError(self._failure)
        except BaseException:
            await self._stop()
            raise

    @property
    def pid(self) -> int:
        """Of the engine process."""
        assert self._process is not None, "the engine loop has no process of its own"
        return self._process.pid

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
        """See EngineClient. *request_id* need not be unique."""
        deadline = None if timeout_s is None else self._clock() + timeout_s
        self._check_accepting()
        token_ids = await self._intake.encode(prompt, add_special_tokens)
        self._check_accepting()
        request = self._intake.request(request_id, token_ids, params, deadline, cache_salt, streams)
        live = self._add(request, express)
        try:
            while (output := await live.next()) is not None:
                yield output
        finally:
            self._end(live)

    def health(self) -> Health:
        if self._failure is not None:
            return Health(Phase.FAILED, self._failure)
        if self._draining:
            return Health(Phase.DRAINING, f"draining: {len(self._live)} requests finish, new ones are refused")
        if not self._ready.is_set():
            return Health(Phase.STARTING, "starting: the engine is loading")
        if self._stall.stalled:
            idle = f"stalled: no step has completed for {self._stall.idle_s:.0f} s with {len(self._live)} requests live"
            return Health(Phase.STALLED, idle)
        return Health(Phase.READY, "ready")

    def watch_health(self, changed: Callable[[], None]) -> None:
        self._health_changed = changed

    def stats(self) -> Stats:
        return self._stats

    def stream_interval(self) -> int:
        return self._interval.tokens

    def start_profile(self) -> None:
        """Ends the recording that runs, if any, and begins the next; only for an engine started with *profile*."""
        self._send(Profile())

    async def drain(self, timeout_s: float) -> None:
        try:
            await self._drain(timeout_s)
        finally:
            if self._process is not None:
                self._process.kill()  # it has ended, unless the drain was cut short

    async def _drain(self, timeout_s: float) -> None:
        self._draining = True
        self._health_changed()
        if self._live and timeout_s > 0:
            self._all_ended.clear()
            try:
                await asyncio.wait_for(self._all_ended.wait(), timeout_s)
            except TimeoutError:
                _log.warning("%d requests did not finish within %s s and are ended", len(self._live), timeout_s)
        for live in list(self._live.values()):
            self._cut_off(live, _shutting_down())
        if self._live:
            await self._all_ended.wait()
        await self._stop()

    async def _stop(self) -> None:
        self._stopping = True
        self._send(Stop())
        if self._process is not None:
            await self._process.stop(self._stop_grace_s)
        self._close_link()

    def on_report(self, report: Report) -> None:
        """From the link: what the engine loop says."""
        match report:
            case StepDone(events, stats):
                self._stats = stats or self._stats
                self._stall.progressed()
                self._interval.progressed()
                self._keep_pace()
                self._deliver(events)
            case Ready():
                self._ready.set()
                self._health_changed()
            case Failed(reason):
                self._fail(reason)
                self._close_link()

    def on_lost(self, reason: str) -> None:
        """From the link: the engine loop is gone."""
        if not self._stopping:
            self._fail(reason)

    def _check_accepting(self) -> None:
        """Raises what a request is told that cannot be taken now, whatever it asks."""
        if self._failure is not None:
            raise EngineError(self._failure)
        if self._draining:
            raise _shutting_down()
        if len(self._live) >= self.limits.max_num_seqs + self.limits.max_waiting:
            raise RequestError(
                f"{self.limits.max_num_seqs} requests may run and {self.limits.max_waiting} wait, and all places are "
                "taken: try again later, or serve with a larger --max-waiting",
                code=ErrorCode.OVERLOADED,
            )

    def _add(self, request: Request, express: Express | None) -> LiveRequest:
        live = LiveRequest(request.request_id, request.params.n, express, self._interval)
        self._processor.add(request)
        idle = not self._live
        if idle:
            self._all_ended.clear()
            self._stall.begin()
            self._interval.begin()
        self._keep_pace()
        self._live[request.request_id] = live
        if request.deadline is not None:
            live.timer = asyncio.get_running_loop().call_later(
                request.deadline - self._clock(), self._cut_off, live, _deadline_exceeded()
            )
        if self._gate is not None:
            self._gate.add(Add(request), engine_idle=idle)
        return live

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
                self._end(live, EngineError(f"internal error: {error!r}"))
            if live.num_unfinished == 0:
                self._forget(live)
        for request_id, index in step.aborts:
            self._send(Abort(request_id, index))
        for request_id, failure in step.failures:
            live = self._live.get(request_id)
            if live is not None:
                live.fail(live.cut_off_with or failure)
                self._forget(live)

    def _cut_off(self, live: LiveRequest, error: CastlineError) -> None:
        """Ends a request early, with *error* behind the tokens that the engine process still holds of it.

        An engine that does not hand them over within LAST_TOKENS_S keeps them.
        """
        live.cut_off_with = error
        self._send(Abort(live.request_id))
        if live.timer is not None:
            live.timer.cancel()
        live.timer = asyncio.get_running_loop().call_later(LAST_TOKENS_S, self._end, live, error)

    def _end(self, live: LiveRequest, error: CastlineError | None = None) -> None:
        """Ends a request early, with *error* for its reader if it has one. A request that has ended is left alone."""
        if self._forget(live):
            self._send(Abort(live.request_id))
            if error is not None:
                live.fail(error)

    def _forget(self, live: LiveRequest) -> bool:
        """Whether it was still there."""
        if live.timer is not None:
            live.timer.cancel()
        self._processor.remove(live.request_id)
        known = self._live.pop(live.request_id, None) is not None
        if known and not self._live:
            self._all_ended.set()
            self._stall.end()
            self._interval.end()
        return known

    def _fail(self, reason: str) -> None:
        """The first reason stays: a process that reports a failure also goes away."""
        if self._failure is not None:
            return
        _log.error("engine failed: %s", reason)
        self._failure = reason
        self._ready.set()
        self._health_changed()
        for live in list(self._live.values()):
            self._end(live, EngineError(reason))

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()

    def _send(self, command: Command) -> None:
        if self._gate is not None:
            self._gate.send(command)


def _nobody_watches() -> None: ...


def _shutting_down() -> RequestError:
    return RequestError("the server is shutting down: send the request to another", code=ErrorCode.SHUTTING_DOWN)


def _deadline_exceeded() -> RequestError:
    return RequestError("the request did not finish before its deadline", code=ErrorCode.DEADLINE_EXCEEDED)
