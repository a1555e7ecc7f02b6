"""Requests that reach an idle engine together are computed together, and one alone does not wait for others."""

import asyncio
from collections.abc import Callable, Sequence
from time import sleep
from typing import Any

import pytest

from castline.runtime import arrival_gate
from castline.runtime.arrival_gate import LONGEST_S, QUIET_S, QUIET_TURNS, ArrivalGate
from castline.runtime.request import Request
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.wire import Abort, Add, Command

STEP_TOKENS = 100


def add(name: str, num_tokens: int = 10) -> Add:
    return Add(Request(name, tuple(range(num_tokens)), SamplingParams(max_tokens=4)))


class Sent:
    """What the engine is sent, and a clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1.0
        self.batches: list[list[str]] = []
        self.gate = ArrivalGate(self._note, STEP_TOKENS, lambda: self.now)

    def _note(self, commands: Sequence[Command]) -> None:
        self.batches.append([c.request.request_id if isinstance(c, Add) else type(c).__name__ for c in commands])


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def run(scenario: Callable[[Sent], Any]) -> list[list[str]]:
    sent = Sent()
    asyncio.run(scenario(sent))
    return sent.batches


def test_requests_that_keep_coming_are_sent_together() -> None:
    """A step for the first one alone would hold the others up."""

    async def scenario(sent: Sent) -> None:
        for name in "abcd":
            sent.gate.add(add(name), engine_idle=name == "a")
            await turns(QUIET_TURNS // 2)
            sent.now += 1.5 * QUIET_S  # long turns, in which other requests are read
        assert not sent.batches
        await turns(QUIET_TURNS)

    assert run(scenario) == [["a", "b", "c", "d"]]


def test_a_request_alone_waits_for_the_quiet_time_and_no_longer() -> None:
    """Its first token is what a single user waits for."""

    async def scenario(sent: Sent) -> None:
        sent.gate.add(add("a"), engine_idle=True)
        await turns(10 * QUIET_TURNS)
        assert not sent.batches, "turns of an idle loop take no time: others may be on their way"
        sent.now += 1.5 * QUIET_S
        await turns(1)
        assert sent.batches == [["a"]]
        sent.now += 1.0
        await turns(3)

    assert run(scenario) == [["a"]]


def test_an_engine_at_work_is_sent_a_request_at_once() -> None:
    """It reads between steps: to hold the request could make it miss one."""

    async def scenario(sent: Sent) -> None:
        sent.gate.add(add("a"), engine_idle=False)
        sent.gate.add(add("b"), engine_idle=False)

    assert run(scenario) == [["a"], ["b"]]


def test_prompts_that_fill_a_step_wait_for_no_more() -> None:
    """A long queue that builds up before an idle engine must not keep it idle."""

    async def scenario(sent: Sent) -> None:
        sent.gate.add(add("a", STEP_TOKENS - 1), engine_idle=True)
        assert not sent.batches
        sent.gate.add(add("b", 1), engine_idle=False)
        assert sent.batches == [["a", "b"]]
        sent.gate.add(add("c", STEP_TOKENS), engine_idle=True)
        sent.now += 1.0
        await turns(3)

    assert run(scenario) == [["a", "b"], ["c"]]


def test_a_stream_of_arrivals_is_cut_off() -> None:
    """Small requests that never stop coming would keep the engine idle for as long as they come."""

    async def scenario(sent: Sent) -> None:
        for place in range(8):
            sent.gate.add(add(str(place), 1), engine_idle=place == 0)
            sent.now += LONGEST_S / 8.5
            await turns(1)
        assert not sent.batches
        sent.now += LONGEST_S / 8.5
        await turns(1)

    assert run(scenario) == [[str(place) for place in range(8)]]


def test_what_is_no_request_goes_at_once_behind_what_is_held() -> None:
    """An abort that overtook its request would be forgotten, and the request run for nobody."""

    async def scenario(sent: Sent) -> None:
        sent.gate.add(add("a"), engine_idle=True)
        sent.gate.send(Abort("a"))
        sent.gate.add(add("b"), engine_idle=True)
        await turns(2)  # the turns of the first hold must not count for the second
        assert sent.batches == [["a", "Abort"]]
        sent.now += 1.5 * QUIET_S
        await turns(QUIET_TURNS + 1)

    assert run(scenario) == [["a", "Abort"], ["b"]]


def test_a_burst_is_one_step_of_the_engine(scripted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate must stand where requests pass: their prompts, a turn or two apart, are computed in a single step."""
    monkeypatch.setattr(arrival_gate, "LONGEST_S", 60.0)  # a loud machine may take the processor away meanwhile
    made = scripted()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    async def scenario() -> None:
        engine = await made.start()

        async def one(place: int) -> None:
            await turns(2 * place)
            sleep(0.02)  # a long turn: the door reads a request while an engine could start on the one before
            prompt = f"prompt {place}"[-6:]
            outputs = [output async for output in engine.generate(prompt, params, request_id="r")]
            assert "".join(output.text for output in outputs) == made.text(prompt, 1)

        await asyncio.gather(*(one(place) for place in range(4)))
        assert made.executor.num_steps == 1
        await made.idle(engine)

    asyncio.run(asyncio.wait_for(scenario(), 60))
