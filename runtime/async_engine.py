"""The engine inside an event loop: text in, text out, over an engine loop in a process of its own."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic
from typing import Final

from castline.engines.affinity import keep_off
from castline.engines.errors import EngineError, ErrorCode, RequestError
from castline.engines.manifest import Manifest
from castline.runtime.admission import validate_places
from castline.runtime.arrival_gate import ArrivalGate
from castline.runtime.client import EffectiveLimits, Express, Health, Output, Phase, Stats
from castline.runtime.engine_child import EngineProcess
from castline.runtime.engine_link import EngineLink
from castline.runtime.intake import Intake
from castline.runtime.live_requests import LiveRequests
from castline.runtime.loader import EnginePlan
from castline.runtime.profile_options import ProfileOptions
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.stall_watch import StallWatch
from castline.runtime.stream_interval import StreamInterval
from castline.runtime.tokenizer import Tokenizer, load_tokenizer
from castline.runtime.wire import Add, Command, Failed, Profile, Ready, Report, StepDone, Stop

STOP_GRACE_S: Final = 0.5
"""What a step in flight may take to end after Stop; then the engine process, which has nothing to save, is killed."""

PROFILE_GRACE_S: Final = 30.0
"""What an engine may take to end that has a profile to write."""

STALL_AFTER_S: Final = 30.0

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
        self._intake = Intake(tokenizer, manifest.model.vocab_size, limits, clock)
        self._stats = Stats(kv_blocks_total=limits.num_blocks)
        self._health_changed: Callable[[], None] = _nobody_watches
        self._stall = StallWatch(stall_after_s, clock, lambda: self._health_changed())
        self._live = LiveRequests(tokenizer, self._interval, self._stall, self._send, clock)
        self._link: EngineLink | None = None
        self._gate: ArrivalGate | None = None
        self._process: EngineProcess | None = None
        self._ready = asyncio.Event()
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

        *loading* is that process where it was told to load *plan* before, with the same *profile*.
        """
        process, connection = loading or EngineProcess.start(plan, profile)
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, plan.bundle)
            engine = cls(plan.manifest, plan.limits, tokenizer, stall_after_s=stall_after_s, interval=interval)
        except BaseException:
            process.abandon(connection)
            raise
        if profile is not None:
            engine._stop_grace_s = PROFILE_GRACE_S
        await engine.connect(connection, process)
        return engine

    async def connect(self, connection: socket.socket, process: EngineProcess | None = None) -> None:
        """Takes over the socket to an engine loop, and waits until that is ready. Raises EngineError."""
        self._process = process
        exit_reason = process.exit_reason if process is not None else lambda: "the engine loop is gone"
        try:
            self._link = await EngineLink.connect(connection, self, exit_reason)
            self._gate = ArrivalGate(self._link.send, self.limits.max_num_batched_tokens)
            await self._ready.wait()
            if self._failure is not None:
                raise EngineError(self._failure)
        except BaseException:
            if self._link is None:
                connection.close()  # which tells the loop
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
        request = self._intake.request(request_id, token_ids, params, deadline, cache_salt, streams)
        validate_places(1, request.params.n, self.limits)
        self._check_accepting(request.params.n)
        idle = not self._live
        live = self._live.add(request, express)
        try:
            if self._gate is not None:
                self._gate.add(Add(request), engine_idle=idle)
            while (output := await live.next()) is not None:
                yield output
        finally:
            self._live.end(live)

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
        self._intake.refuse(_shutting_down)
        self._health_changed()
        if self._live and timeout_s > 0:
            try:
                await asyncio.wait_for(self._live.wait_for_end(), timeout_s)
            except TimeoutError:
                _log.warning("%d requests did not finish within %s s and are ended", len(self._live), timeout_s)
        for live in list(self._live.values()):
            self._live.cut_off(live, _shutting_down())
        await self._live.wait_for_end()
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
            case StepDone(events, stats, core):
                if stats is not None:
                    self._stats = stats
                    keep_off(self, core)
                self._live.progressed(events)
            case Ready():
                self._ready.set()
                self._health_changed()
            case Failed(reason):
                self._fail(reason)
                self._close_link()

    def on_unsendable(self, command: Command, error: Exception) -> None:
        """From the link: the engine loop never hears of a request, so its reader is told."""
        if isinstance(command, Add) and (live := self._live.get(command.request.request_id)) is not None:
            _log.error("request %r cannot be sent", live.request_id, exc_info=error)
            self._live.end(live, EngineError(f"internal error: {error!r}"))

    def on_lost(self, reason: str) -> None:
        """From the link: the engine loop is gone."""
        keep_off(self, None)  # here, for until now another report could come
        if not self._stopping:
            self._fail(reason)

    def _check_accepting(self, n: int = 1) -> None:
        """Raises what a request of *n* continuations is told that cannot be taken now, whatever else it asks."""
        if self._failure is not None:
            raise EngineError(self._failure)
        if self._draining:
            raise _shutting_down()
        free = self.limits.num_places - self._live.num_continuations
        if n > free:
            raise RequestError(
                f"{self.limits.max_num_seqs} continuations may run and {self.limits.max_waiting} wait, n of each "
                f"request, and {free} of these places are free for {n}: try again later, or serve with a larger "
                "--max-waiting",
                code=ErrorCode.OVERLOADED,
            )

    def _fail(self, reason: str) -> None:
        """The first reason stays: a process that reports a failure also goes away."""
        if self._failure is not None:
            return
        _log.error("engine failed: %s", reason)
        self._failure = reason
        self._ready.set()
        self._health_changed()
        self._intake.refuse(lambda: EngineError(reason))
        for live in list(self._live.values()):
            self._live.end(live, EngineError(reason))

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()

    def _send(self, command: Command) -> None:
        if self._gate is not None:
            self._gate.send(command)


def _nobody_watches() -> None: ...


def _shutting_down() -> RequestError:
    return RequestError("the server is shutting down: send the request to another", code=ErrorCode.SHUTTING_DOWN)
