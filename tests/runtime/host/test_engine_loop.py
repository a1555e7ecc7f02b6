"""The loop around a core: commands in order, reports of what steps bring, and no work where there is none."""

import socket
from collections.abc import Callable, Iterator
from threading import Event, Thread
from time import monotonic

import pytest

from castline.runtime.client import Stats
from castline.runtime.engine_loop import CommandSocket, Disconnected, run_engine_loop
from castline.runtime.events import Finish, FinishReason, SequenceEvent
from castline.runtime.request import Request
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.wire import Abort, Add, Command, Pace, Report, StepDone, Stop, encode, report_reader


class CountingCore:
    """Gives each request the tokens 0, 1, 2, …, one a step, until max_tokens. Notes what it was asked."""

    report_interval = 1

    def __init__(self) -> None:
        self.live: dict[str, list[int]] = {}
        self.aborted: list[tuple[str, int | None]] = []
        self.steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def add_request(self, request: Request) -> None:
        assert request.params.max_tokens is not None
        self.live[request.request_id] = [0, request.params.max_tokens]

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))
        self.live.pop(request_id, None)

    def step(self) -> list[SequenceEvent]:
        assert self.live, "a step without work"
        self.steps += 1
        events = []
        for request_id, state in list(self.live.items()):
            token, end = state
            if request_id == "poison":
                raise RuntimeError("poisoned")
            state[0] += 1
            last = state[0] == end
            if state[0] % self.report_interval and not last:
                continue
            events.append(SequenceEvent(request_id, 0, (token,), finish=Finish(FinishReason.LENGTH) if last else None))
            if last:
                del self.live[request_id]
        return events

    def stats(self) -> Stats:
        return Stats(num_running=len(self.live), steps=self.steps)


class Loop:
    """A loop in a thread, and the serving side of its socket."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.core = CountingCore()
        self._clock = clock
        self.ours, self._theirs = socket.socketpair()
        self.ours.settimeout(10)
        self._reader = report_reader()
        self._pending: list[Report] = []
        self.outcome: BaseException | None = None
        self.thread = Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        with self._theirs:
            try:
                run_engine_loop(self.core, CommandSocket(self._theirs), clock=self._clock)
            except BaseException as error:
                self.outcome = error

    def send(self, *commands: Command) -> None:
        self.ours.sendall(b"".join(encode(command) for command in commands))

    def report(self) -> StepDone:
        while not self._pending:
            self._pending += self._reader.feed(self.ours.recv(1 << 16))
        report = self._pending.pop(0)
        assert isinstance(report, StepDone)
        return report

    def join(self) -> None:
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def loop() -> Iterator[Loop]:
    running = Loop()
    yield running
    running.ours.close()
    running.join()


def request(request_id: str, max_tokens: int) -> Request:
    return Request(request_id, (1, 2), SamplingParams(max_tokens=max_tokens))


def test_one_report_a_step_until_the_work_is_done(loop: Loop) -> None:
    """Reports held back or merged would delay the first token; the last must say that nothing runs any more."""
    loop.send(Add(request("a", 3)))
    reports = [loop.report() for _ in range(3)]
    assert [e.token_ids for r in reports for e in r.events] == [(0,), (1,), (2,)]
    assert (reports[-1].stats.steps, reports[-1].stats.num_running) == (3, 0)


def test_statistics_are_reported_now_and_then_and_at_the_end() -> None:
    """Counted anew for every token they cost more than a step has to give; left out at the end they stay wrong."""
    times = iter([0.0, 0.0, 0.0, 0.01, 0.09, 0.1, 0.12, 0.19, 0.21, 0.215, 0.216])
    running = Loop(clock=lambda: next(times))
    running.send(Add(request("a", 7)))
    reports = [running.report() for _ in range(7)]
    assert [r.stats and r.stats.steps for r in reports] == [1, None, None, 4, None, None, 7]
    running.ours.close()
    running.join()


def test_time_without_work_is_not_counted() -> None:
    """Prevents an engine that looks busy because nobody asks it anything; what follows a last report is in the next."""
    begun, asked, steps, said = 0.0, 5.0, [5.25, 5.5], 5.75
    times = iter([begun, begun, asked, *steps, said, 100.0, 100.5, 101.0])
    running = Loop(clock=lambda: next(times))
    running.send(Add(request("a", 2)))
    reports = [running.report() for _ in range(2)]
    assert [r.stats.busy_s for r in reports] == [0.25, 0.5]
    running.send(Add(request("b", 1)))
    assert running.report().stats.busy_s == 0.75 + 0.5
    running.ours.close()
    running.join()


def test_commands_that_bring_no_work_are_not_counted() -> None:
    """Prevents an engine that opens itself anew for a recording, while nobody asks it anything, from looking busy."""
    times = iter([0.0, 0.0, 5.0, 9.0, 9.0, 20.0, 20.5, 20.5, 20.5])
    done = Event()

    def clock() -> float:
        now = next(times)
        if now == 9.0:
            done.set()
        return now

    running = Loop(clock=clock)
    running.send(Abort("nobody"))
    assert done.wait(60)
    running.send(Add(request("a", 1)))
    assert running.report().stats.busy_s == 0.5
    running.ours.close()
    running.join()


def test_a_step_that_says_nothing_is_not_reported() -> None:
    """Prevents a wake-up of the serving process for every step, and one that never hears that steps go on."""
    times = iter([0.0, 0.0, 0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.12, 0.13, 0.14, 0.15])
    running = Loop(clock=lambda: next(times))
    running.send(Pace(4), Add(request("a", 8)))
    reports = [running.report() for _ in range(4)]
    assert [(len(r.events), r.stats and r.stats.steps) for r in reports] == [(0, 1), (1, None), (0, 6), (1, 8)]
    running.ours.close()
    running.join()


def test_a_pace_is_for_the_requests_in_flight_too(loop: Loop) -> None:
    """Prevents streams that keep the interval they began with, and a pace that overtakes, or waits for, a request."""
    loop.send(Add(request("a", 10**9)))
    loop.report()
    loop.send(Pace(1000), Add(request("b", 1)))
    while not any(e.request_id == "b" for e in loop.report().events):
        pass
    assert loop.core.report_interval == 1000


def test_commands_that_arrive_together_share_a_step(loop: Loop) -> None:
    """Taking one command a step would admit 64 clients over 64 steps."""
    loop.send(*(Add(request(str(i), 1)) for i in range(64)))
    assert len(loop.report().events) == 64


def test_an_idle_loop_takes_no_step(loop: Loop) -> None:
    """An engine that steps or spins while idle burns a core."""
    loop.send(Add(request("a", 5)))
    for _ in range(5):
        loop.report()
    loop.send(Add(request("b", 1)), Stop())
    loop.join()
    assert loop.core.steps <= 6


def test_an_unknown_abort_wakes_nothing(loop: Loop) -> None:
    """A step without work is an assertion in the core: a late abort must not cause one."""
    loop.send(Abort("nobody"), Abort("nobody", 1))
    loop.send(Add(request("a", 1)))
    assert loop.report().stats.steps == 1
    assert loop.core.aborted == [("nobody", None), ("nobody", 1)]


def test_stop_leaves_the_loop_with_work_undone(loop: Loop) -> None:
    """Shut-down at the drain's time-out must not wait for a long generation."""
    loop.send(Add(request("a", 10**9)), Stop())
    loop.join()
    assert loop.outcome is None


def test_the_loop_ends_when_the_server_is_gone(loop: Loop) -> None:
    """An orphan that holds a pool of gigabytes and keeps generating; while busy and while idle."""
    loop.send(Add(request("a", 10**9)))
    loop.report()
    loop.ours.close()
    loop.join()
    assert isinstance(loop.outcome, Disconnected)
    idle = Loop()
    idle.ours.close()
    idle.join()
    assert isinstance(idle.outcome, Disconnected)


def test_what_a_step_raises_leaves_the_loop(loop: Loop) -> None:
    """A core that is broken must end the process with its reason, not be stepped again for ever."""
    loop.send(Add(request("poison", 1)))
    loop.join()
    assert str(loop.outcome) == "poisoned"
