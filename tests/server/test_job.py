"""A request of several prompts, over an engine that notes when each begins."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from castline.engines.errors import RequestError
from castline.runtime.client import EngineClient, Output
from castline.runtime.events import FinishReason
from castline.runtime.sampling_params import SamplingParams
from castline.server.job import AnswerWriter, Job, run


class Beginnings:
    """``turns`` counts the turns of another task; ``began`` is what it was when each prompt was handed over."""

    def __init__(self) -> None:
        self.turns = 0
        self.began: list[int] = []

    async def generate(self, prompt: str, params: SamplingParams, **options: Any) -> AsyncIterator[Output]:
        self.began.append(self.turns)
        yield Output(0, prompt, (1,), finish_reason=FinishReason.LENGTH)

    async def others(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)


def test_other_requests_have_their_turn_between_the_prompts_of_one() -> None:
    """Prevents thousands of prompts in one body that are encoded in one go, while every stream stands still."""

    async def scenario() -> list[Output]:
        others = asyncio.create_task(engine.others())
        job = Job("r", [str(i) for i in range(50)], SamplingParams(), True, None, cast(AnswerWriter, None))
        outputs = [output async for output in run(cast(EngineClient, engine), job)]
        others.cancel()
        return outputs

    engine = Beginnings()
    outputs = asyncio.run(scenario())
    assert sorted((output.index, output.text) for output in outputs) == [(i, str(i)) for i in range(50)]
    assert len(set(engine.began)) == 50


@pytest.mark.parametrize(
    ("field", "told"), [("prompt", "prompt[2]"), ("prompt[7]", "prompt[2][7]"), ("n", "n"), (None, None)]
)
def test_a_refused_prompt_of_a_list_is_named(field: str | None, told: str | None) -> None:
    """Prevents searching a thousand prompts for the one that is empty."""

    class Refusing(Beginnings):
        async def generate(self, prompt: str, params: SamplingParams, **options: Any) -> AsyncIterator[Output]:
            if prompt == "2":
                raise RequestError("no", field=field)
            yield Output(0, prompt, (1,), finish_reason=FinishReason.LENGTH)

    async def scenario() -> None:
        job = Job("r", [str(i) for i in range(4)], SamplingParams(), True, None, cast(AnswerWriter, None))
        async for _ in run(cast(EngineClient, Refusing()), job):
            pass

    with pytest.raises(RequestError) as refused:
        asyncio.run(scenario())
    assert refused.value.field == told


def test_a_slow_reader_of_several_prompts_holds_no_queue() -> None:
    """Prevents every token of thousands of streams from lying in memory while their client does not read."""

    class Endless:
        made = running = 0

        async def generate(self, prompt: str, params: SamplingParams, **options: Any) -> AsyncIterator[Output]:
            self.running += 1
            try:
                for i in itertools.count():
                    await asyncio.sleep(0)
                    self.made += 1
                    yield Output(0, f"{prompt}:{i}", (1,))
            finally:
                self.running -= 1

    async def scenario() -> None:
        engine = Endless()
        job = Job("r", list("abcd"), SamplingParams(), True, None, cast(AnswerWriter, None))
        outputs = run(cast(EngineClient, engine), job)
        texts = [(await anext(outputs)).text]
        for _ in range(1000):
            await asyncio.sleep(0)
        assert engine.running == 4
        assert engine.made <= 1 + 2 * 4, "one read, and of each prompt one in the queue and one before it"
        texts += [(await anext(outputs)).text for _ in range(40)]
        for prompt in "abcd":
            of_prompt = [text for text in texts if text.startswith(prompt)]
            assert of_prompt == [f"{prompt}:{i}" for i in range(len(of_prompt))]
        await outputs.aclose()
        assert engine.running == 0

    asyncio.run(scenario())
