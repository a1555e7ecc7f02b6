"""Tokens that wait in the engine process: it is told how long, and what waits reaches a reader that is cut off."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from threading import Semaphore
from typing import Any

import pytest

from castline.engines.errors import CastlineError, EngineError, ErrorCode, RequestError
from castline.runtime import live_requests
from castline.runtime.async_engine import AsyncEngine
from castline.runtime.client import Output
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.stream_interval import AdaptiveInterval, StreamInterval
from castline.runtime.wire import Report, StepDone

GREEDY = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
Scripted = Callable[..., Any]


class Reader:
    """Reads one request to its end, and notes what comes."""

    def __init__(self, engine: AsyncEngine, prompt: str, params: SamplingParams = GREEDY, **options: Any) -> None:
        self.outputs: list[Output] = []
        self.error: CastlineError | None = None
        self._stream = engine.generate(prompt, params, request_id="r", **options)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for output in self._stream:
                self.outputs.append(output)
        except CastlineError as error:
            self.error = error

    def text(self, index: int = 0) -> str:
        return "".join(output.text for output in self.outputs if output.index == index)


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread brings about."""
    while not condition():
        await asyncio.sleep(0.001)


def noting_reports(engine: AsyncEngine) -> list[StepDone]:
    """What *engine* is told from now on."""
    reports: list[StepDone] = []
    on_report = engine.on_report

    def note(report: Report) -> None:
        assert isinstance(report, StepDone)
        reports.append(report)
        on_report(report)

    engine.on_report = note  # type: ignore[method-assign]
    return reports


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_engine_loop_holds_what_makes_no_message(scripted: Scripted) -> None:
    """Prevents messages between the processes that nobody's reader gets, and a pace that the loop never hears of."""
    made = scripted()

    async def scenario() -> None:
        engine = await made.start(interval=StreamInterval(8))
        reports = noting_reports(engine)
        streamed, whole = Reader(engine, "ab"), Reader(engine, "xy", streams=False)
        await asyncio.gather(streamed.task, whole.task)
        assert made.core.report_interval == 8
        assert streamed.text() == made.text("ab", 200)
        assert whole.text() == made.text("xy", 200)
        assert all(report.events or report.stats for report in reports), "a report that says nothing"
        assert sorted(sizes_by_request(reports)) == [[1, *[8] * 24, 7], [1, 199]]
        await made.idle(engine)

    run(scenario)


def sizes_by_request(reports: list[StepDone]) -> list[list[int]]:
    """How many tokens each event had."""
    sizes: dict[str, list[int]] = {}
    for event in itertools.chain.from_iterable(report.events for report in reports):
        sizes.setdefault(event.request_id, []).append(len(event.token_ids))
    return list(sizes.values())


def test_the_pace_follows_the_load_up_and_down(scripted: Scripted, loaded_interval: AdaptiveInterval) -> None:
    """Prevents an engine that holds tokens back for a load that is over, or that began with another pace."""
    made = scripted()

    async def scenario() -> None:
        engine = await made.start(interval=loaded_interval)
        made.executor.gate = gate = Semaphore(1)
        busy = Reader(engine, "busy")
        await until(lambda: engine.stream_interval() == 8)
        gate.release(2)
        await until(lambda: made.core.report_interval == 8)
        made.open_gate()
        await busy.task
        assert busy.text() == made.text("busy", 200)
        assert engine.stream_interval() == 1, "no request is left"
        paces: list[int] = []
        made.executor.on_step = lambda step: paces.append(made.core.report_interval)
        following = Reader(engine, "next")
        await following.task
        assert following.text() == made.text("next", 200)
        assert paces[0] == 1, "told before the request that begins anew"
        assert paces[-1] == 8
        await made.idle(engine)

    run(scenario)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("way", ["deadline", "drain", "failed step"])
def test_who_is_cut_off_gets_what_was_generated(
    scripted: Scripted, way: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents streams that end without the last tokens, which the engine process had and nobody was sent."""
    monkeypatch.setattr(live_requests, "LAST_TOKENS_S", 50.0)  # no test of how fast this machine is
    made = scripted()
    errors = {"deadline": ErrorCode.DEADLINE_EXCEEDED, "drain": ErrorCode.SHUTTING_DOWN}

    def refuse(step: Any) -> None:
        if way == "failed step" and made.executor.num_steps >= 6:
            raise EngineError("no more")

    made.executor.on_step = refuse

    async def scenario() -> None:
        engine = await made.start(interval=StreamInterval(8))
        made.executor.gate = Semaphore(6)
        reader = Reader(engine, "ab", replace(GREEDY, n=n), timeout_s=1.0 if way == "deadline" else None)
        await until(lambda: made.executor.num_steps == 6)
        known = [
            len(seq.token_ids) - 2 for seq in made.core.scheduler.groups[next(iter(engine._live))].members.values()
        ]
        if way == "drain":
            drain = asyncio.create_task(engine.drain(0))
            await asyncio.sleep(0)
        elif way == "deadline":
            await until(lambda: all(live.cut_off_with is not None for live in engine._live.values()))
        made.open_gate()
        await reader.task
        for index in range(n):
            had = reader.text(index)
            assert had == made.text("ab", len(had))
            assert len(had) >= known[index] > 1
        if way == "failed step":
            assert isinstance(reader.error, EngineError)
        else:
            assert isinstance(reader.error, RequestError)
            assert reader.error.code is errors[way]
        if way == "drain":
            await drain
        else:
            await made.idle(engine)

    run(scenario)


def test_a_client_that_leaves_while_its_tokens_wait_leaves_nothing(scripted: Scripted) -> None:
    """Prevents tokens that are handed over to nobody, or to the next request of that place."""
    made = scripted()

    async def scenario() -> None:
        engine = await made.start(interval=StreamInterval(8))
        made.executor.gate = Semaphore(5)
        reader = Reader(engine, "gone")
        await until(lambda: made.executor.num_steps == 5)
        reader.task.cancel()
        await asyncio.gather(reader.task, return_exceptions=True)
        made.open_gate()
        await made.idle(engine)
        following = Reader(engine, "next")
        await following.task
        assert following.text() == made.text("next", 200)

    run(scenario)


def test_steps_that_report_no_token_are_progress(scripted: Scripted) -> None:
    """Prevents a server that is taken out of service because its only request wants the whole."""
    made = scripted()
    made.now = 1000.0

    async def scenario() -> None:
        engine = await made.start(stall_after_s=30)
        made.executor.gate = gate = Semaphore(1)
        reader = Reader(engine, "ab", streams=False)
        await until(lambda: bool(reader.outputs))
        for _ in range(3):
            made.now += 29
            steps = engine.stats().steps
            while engine.stats().steps == steps:  # its statistics come ten times a second
                gate.release()
                await asyncio.sleep(0.01)
            assert engine.health().ready
        made.open_gate()
        await reader.task
        assert reader.text() == made.text("ab", 200)

    run(scenario)
