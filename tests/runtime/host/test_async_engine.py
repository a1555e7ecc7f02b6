"""Requests through the serving side, over a real core with scripted logits: outcomes, and nothing left behind."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from threading import Semaphore
from typing import Any, cast

import pytest

from castline.engines.errors import EngineError, ErrorCode, RequestError
from castline.runtime.async_engine import AsyncEngine
from castline.runtime.client import Output, Phase
from castline.runtime.events import FinishReason
from castline.runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
Scripted = Callable[..., Any]


def stream(engine: AsyncEngine, prompt: str, params: SamplingParams = GREEDY, **options: Any) -> AsyncIterator[Output]:
    return engine.generate(prompt, params, **{"request_id": "r", **options})


async def collect(engine: AsyncEngine, prompt: str, params: SamplingParams = GREEDY, **options: Any) -> list[Output]:
    return [output async for output in stream(engine, prompt, params, **options)]


def text_of(outputs: list[Output], index: int = 0) -> str:
    return "".join(output.text for output in outputs if output.index == index)


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread brings about; fails after 20 s."""

    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), 60)


async def settled(scripted: Any, engine: AsyncEngine) -> None:
    """Waits until the engine reports that nothing runs; then nothing of any request may be left on either side."""
    await until(lambda: not scripted.core.has_work and engine.stats().num_running == engine.stats().num_waiting == 0)
    await until(lambda: engine.stats().kv_blocks_used == 0)
    assert len(engine._live) == len(engine._live._processor) == 0
    assert not scripted.core.scheduler.groups
    assert len(scripted.core._sampler) == 0
    scripted.core.scheduler.check()


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_text_tokens_and_prompt_arrive(scripted: Scripted) -> None:
    """The whole way there and back: token ids and text agree; the prompt is reported once, with its cached tokens."""
    made = scripted()

    async def scenario() -> None:
        engine = await made.start()
        prompt = "x" * 40
        for cached in (0, 32):
            outputs = await collect(engine, prompt)
            assert text_of(outputs) == made.text(prompt, 8)
            assert [t for o in outputs for t in o.token_ids] == [ord(c) for c in made.text(prompt, 8)]
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)
            first, *rest = [o.prompt for o in outputs]
            assert first is not None
            assert first.prompt_token_ids == tuple(b"x" * 40)
            assert first.cached_tokens == cached
            assert not any(rest)
        await settled(made, engine)

    run(scenario)


def test_many_requests_at_once_keep_their_texts_apart(scripted: Scripted) -> None:
    """Events of one step belong to many requests, some of the same id: each reader gets its own, whole."""
    made = scripted()

    async def scenario() -> None:
        engine = await made.start()
        prompts = [chr(97 + i % 26) * (1 + i) for i in range(40)]
        results = await asyncio.gather(
            *(collect(engine, p, replace(GREEDY, n=1 + i % 3)) for i, p in enumerate(prompts))
        )
        for i, (prompt, outputs) in enumerate(zip(prompts, results, strict=True)):
            for index in range(1 + i % 3):
                assert text_of(outputs, index) == made.text(prompt, 8)
                assert sum(o.finish_reason is not None for o in outputs if o.index == index) == 1
        await settled(made, engine)

    run(scenario)


def test_a_slow_reader_gets_everything_in_one_piece(scripted: Scripted) -> None:
    """Unread output is merged: nothing is lost, doubled or reordered, and memory does not grow with each step."""
    made = scripted()

    async def scenario() -> None:
        engine = await made.start()
        outputs = stream(engine, "slow", replace(GREEDY, max_tokens=100, n=2, logprobs=1))
        received = [await anext(outputs)]
        await until(lambda: engine.stats().num_running == 0 and engine.stats().steps > 50)
        received += [o async for o in outputs]
        assert len(received) <= 3
        for index in range(2):
            assert text_of(received, index) == made.text("slow", 100)
            assert len([p for o in received if o.index == index for p in o.logprobs or ()]) == 100
        assert [o.finish_reason for o in received if o.finish_reason] == [FinishReason.LENGTH] * 2
        assert received[0].prompt is not None or received[1].prompt is not None

    run(scenario)


def test_a_stop_string_ends_the_work_too(scripted: Scripted) -> None:
    """The text ends here, but the engine must hear of it: else it goes on to max_tokens for nobody."""
    made = scripted()

    async def scenario() -> None:
        made.executor.gate = Semaphore(20)  # enough for the text; without it 200 steps may outrun the word to stop
        engine = await made.start()
        text = made.text("stop me", 200)
        outputs = await collect(engine, "stop me", replace(GREEDY, max_tokens=200, stop=(text[5:8],)))
        assert text_of(outputs) == text[: text.index(text[5:8])]
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert outputs[-1].stop_reason == text[5:8]
        made.open_gate()
        await settled(made, engine)
        assert made.executor.num_steps <= 22

    run(scenario)


@pytest.mark.parametrize("way", ["closed after the first chunk", "cancelled while it waits", "cancelled in the queue"])
def test_a_client_that_leaves_frees_its_blocks_within_two_steps(scripted: Scripted, way: str) -> None:
    """C46: a gone client must not hold blocks; the sequence had 200 tokens to go."""
    made = scripted(max_num_seqs=1)

    async def scenario() -> None:
        engine = await made.start()
        made.executor.gate = gate = Semaphore(3)
        first = stream(engine, "gone", replace(GREEDY, max_tokens=200))
        await anext(first)
        await until(lambda: made.executor.num_steps == 3)
        if way == "closed after the first chunk":
            await cast(Any, first).aclose()
        else:
            if way == "cancelled in the queue":
                task = asyncio.create_task(collect(engine, "queued"))
                await until(lambda: len(engine._live) == 2)
            else:
                task = asyncio.create_task(anext(first))
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await cast(Any, first).aclose()
        gate.release(100)
        await settled(made, engine)
        assert made.executor.num_steps <= 3 + 2

    run(scenario)


def test_a_deadline_ends_a_running_and_a_waiting_request(scripted: Scripted) -> None:
    """A deadline counts in the queue as well, and holds even when the engine is stuck in a step."""
    made = scripted(max_num_seqs=1)

    async def scenario() -> None:
        engine = await made.start()
        made.executor.gate = Semaphore(1)
        tasks = [collect(engine, p, replace(GREEDY, max_tokens=200), timeout_s=0.05) for p in ("runs", "waits")]
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, RequestError)
            assert error.code is ErrorCode.DEADLINE_EXCEEDED
        made.open_gate()
        await settled(made, engine)

    run(scenario)


def test_one_request_over_the_waiting_limit_is_refused(scripted: Scripted) -> None:
    """An unbounded queue turns overload into timeouts for everybody; the places that come free are given again."""
    made = scripted(max_num_seqs=1, max_waiting=1)

    async def scenario() -> None:
        engine = await made.start()
        made.executor.gate = Semaphore(0)
        running, waiting = (asyncio.create_task(collect(engine, p)) for p in ("run", "wait"))
        await until(lambda: len(engine._live) == 2)
        with pytest.raises(RequestError, match="--max-waiting") as caught:
            await collect(engine, "one more")
        assert caught.value.code is ErrorCode.OVERLOADED
        made.open_gate()
        assert text_of(await running) == made.text("run", 8)
        assert text_of(await waiting) == made.text("wait", 8)
        assert text_of(await collect(engine, "one more")) == made.text("one more", 8)

    run(scenario)


def test_continuations_take_the_places(scripted: Scripted) -> None:
    """A request of a few hundred bytes may ask for 128 texts: counted as one, a hundred such fill the memory."""
    made = scripted(max_num_seqs=2, max_waiting=4)

    async def scenario() -> None:
        engine = await made.start()
        made.executor.gate = Semaphore(0)
        [stop] = made.text("abcd", 1)
        five = asyncio.create_task(collect(engine, "abcd", replace(GREEDY, n=5)))
        await until(lambda: engine._live.num_continuations == 5)
        with pytest.raises(
            RequestError, match=r"2 .* may run and 4 wait.*1 of these .* free for 2.*--max-waiting"
        ) as caught:
            await collect(engine, "x", replace(GREEDY, n=2))
        assert caught.value.code is ErrorCode.OVERLOADED
        one = asyncio.create_task(collect(engine, "abcd", replace(GREEDY, stop=(stop,))))
        await until(lambda: engine._live.num_continuations == 6)
        with pytest.raises(RequestError, match="0 of these"):
            await collect(engine, "x")
        made.open_gate()
        assert text_of(await one) == ""
        outputs = await five
        assert {text_of(outputs, index) for index in range(5)} == {made.text("abcd", 8)}
        await settled(made, engine)
        assert engine._live.num_continuations == 0
        assert len([o for o in await collect(engine, "x", replace(GREEDY, n=6)) if o.finish_reason]) == 6

    run(scenario)


def test_a_continuation_that_ends_frees_its_place(scripted: Scripted) -> None:
    """One text of many may go on for minutes: the others' places are for those who wait."""
    made = scripted(max_num_seqs=1, max_waiting=2)

    async def scenario() -> None:
        engine = await made.start()
        outputs = stream(engine, "abcd", replace(GREEDY, n=3))
        while (await anext(outputs)).finish_reason is None:
            pass
        made.executor.gate = Semaphore(0)
        taken = engine._live.num_continuations
        assert taken < 3
        others = [asyncio.create_task(collect(engine, f"{i}")) for i in range(3 - taken)]
        await until(lambda: engine._live.num_continuations == 3)
        made.open_gate()
        await asyncio.gather(*others)
        await cast(Any, outputs).aclose()
        await settled(made, engine)
        assert engine._live.num_continuations == 0

    run(scenario)


def test_more_continuations_than_there_are_places_are_too_many_for_ever(scripted: Scripted) -> None:
    """Told to try again later, a client would, for ever."""
    made = scripted(max_num_seqs=2, max_waiting=1)

    async def scenario() -> None:
        engine = await made.start()
        with pytest.raises(RequestError, match=r"n is 4, .*at most 3.*--max-waiting") as caught:
            await collect(engine, "a", replace(GREEDY, n=4))
        assert (caught.value.code, caught.value.field) == (ErrorCode.REQUEST_TOO_LARGE, "n")
        assert len([o for o in await collect(engine, "a", replace(GREEDY, n=3)) if o.finish_reason]) == 3

    run(scenario)


@pytest.mark.parametrize(
    ("prompt", "params", "options", "field"),
    [
        ("", GREEDY, {}, "prompt"),
        ([], GREEDY, {}, "prompt"),
        ([VOCAB_SIZE := 260], GREEDY, {}, "prompt[0]"),
        ("a" * 256, GREEDY, {}, "prompt"),
        ("a" * 5000, GREEDY, {}, "prompt"),
        ("a", replace(GREEDY, top_p=2.0), {}, "top_p"),
        ("a", replace(GREEDY, logit_bias={VOCAB_SIZE: 1.0}), {}, "logit_bias[260]"),
        ("a", replace(GREEDY, stop=("ok", "\ud800")), {}, "stop[1]"),
        ("a", GREEDY, {"cache_salt": "a\udfff"}, "cache_salt"),
        ("a", GREEDY, {"cache_salt": 5}, "cache_salt"),
        ([*[0] * 256, VOCAB_SIZE], GREEDY, {}, "prompt"),  # counted before its millions of ids are looked at
    ],
)
def test_a_bad_request_is_refused_before_it_is_queued(
    scripted: Scripted, prompt: Any, params: SamplingParams, options: dict[str, Any], field: str
) -> None:
    """The engine must never see it, and the next good request must be served."""
    made = scripted()

    async def scenario() -> None:
        engine = await made.start()
        with pytest.raises(RequestError) as caught:
            await collect(engine, prompt, params, **options)
        assert caught.value.field == field
        assert text_of(await collect(engine, "good")) == made.text("good", 8)
        assert made.core.stats().prompt_tokens == 4

    run(scenario)


@pytest.mark.parametrize("held", [True, False], ids=["with others, to an idle engine", "alone, to one that works"])
def test_a_request_that_cannot_be_sent_ends_alone(scripted: Scripted, held: bool) -> None:
    """An id of the caller's own that is no text: the request stayed live for ever, and so did those sent with it."""
    made = scripted()

    async def scenario() -> None:
        engine = await made.start()
        if held:
            good = [asyncio.create_task(collect(engine, prompt)) for prompt in ("one", "two")]
        else:
            made.executor.gate = Semaphore(0)
            good = [asyncio.create_task(collect(engine, "one"))]
            await until(lambda: made.core.has_work)
        bad = asyncio.create_task(collect(engine, "bad", request_id="\ud800"))
        good.append(asyncio.create_task(collect(engine, "two")))
        with pytest.raises(EngineError, match="surrogates not allowed"):
            await bad
        made.open_gate()
        for task, prompt in zip(good, ("one", "two", "two"), strict=False):
            assert text_of(await task) == made.text(prompt, 8)
        await settled(made, engine)
        assert engine._live.num_continuations == 0

    run(scenario)


def test_a_request_that_forbids_every_token_is_told_so(scripted: Scripted) -> None:
    """Prevents a client's mistake that is reported, and counted, as a failure of the engine."""
    made = scripted()

    async def scenario() -> None:
        engine = await made.start()
        forbidding = replace(GREEDY, logit_bias=dict.fromkeys(range(VOCAB_SIZE), -100.0))
        with pytest.raises(RequestError, match="logit_bias") as caught:
            await collect(engine, "a", forbidding)
        assert caught.value.code is ErrorCode.INVALID_VALUE
        assert text_of(await collect(engine, "good")) == made.text("good", 8)
        await settled(made, engine)

    run(scenario)


def test_an_unset_max_tokens_fills_the_context(scripted: Scripted) -> None:
    """C26: no max_tokens and no EOS ends at max_model_len with `length`."""
    made = scripted(max_model_len=64)

    async def scenario() -> None:
        engine = await made.start()
        outputs = await collect(engine, "x" * 60, replace(GREEDY, max_tokens=None))
        assert text_of(outputs) == made.text("x" * 60, 4)
        assert outputs[-1].finish_reason is FinishReason.LENGTH

    run(scenario)


def test_a_broken_step_ends_its_request_only(scripted: Scripted) -> None:
    """A step that fails for one sequence must give that client an EngineError and the neighbour its text."""
    made = scripted()

    def refuse(step: Any) -> None:
        if (step.input_ids == ord("!")).any():
            raise EngineError("cannot compute '!'")

    made.executor.on_step = refuse

    async def scenario() -> None:
        engine = await made.start()
        bad, good = await asyncio.gather(collect(engine, "bad!"), collect(engine, "good"), return_exceptions=True)
        assert isinstance(bad, EngineError)
        assert "cannot compute" in str(bad)
        assert not isinstance(good, BaseException)
        assert text_of(good) == made.text("good", 8)
        assert engine.health().ready
        await settled(made, engine)

    run(scenario)


def test_a_fault_in_handing_over_ends_its_request_only(scripted: Scripted) -> None:
    """An exception while an output is written would otherwise close the link that serves all requests."""
    made = scripted()

    def faulty(output: Output) -> bool:
        raise ValueError("cannot be written")

    async def scenario() -> None:
        engine = await made.start()
        bad, good = await asyncio.gather(
            collect(engine, "bad", express=faulty), collect(engine, "good"), return_exceptions=True
        )
        assert isinstance(bad, EngineError)
        assert not isinstance(good, BaseException)
        assert text_of(good) == made.text("good", 8)
        await settled(made, engine)

    run(scenario)


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "refused"])
def test_what_express_takes_does_not_come_again(scripted: Scripted, taken: bool) -> None:
    """Every output goes one way, in order; the ones that end a continuation always go to the reader."""
    made = scripted()
    offered: list[Output] = []

    def express(output: Output) -> bool:
        offered.append(output)
        return taken

    async def scenario() -> None:
        engine = await made.start()
        read = await collect(engine, "both", replace(GREEDY, max_tokens=50, n=2), express=express)
        assert offered
        assert all(output.finish_reason is None for output in offered)
        for index in range(2):
            assert text_of([*offered, *read] if taken else read, index) == made.text("both", 50)
        assert sum(output.finish_reason is not None for output in read) == 2
        await settled(made, engine)

    run(scenario)


def test_express_never_overtakes_a_slow_reader(scripted: Scripted) -> None:
    """While the reader is busy with an output, later ones wait behind it."""
    made = scripted()
    order: list[str] = []

    def express(output: Output) -> bool:
        order.append(output.text)
        return True

    async def scenario() -> None:
        engine = await made.start()
        async for output in stream(engine, "slow", replace(GREEDY, max_tokens=60), express=express):
            steps = engine.stats().steps
            order.append(output.text)
            if output.finish_reason is None:
                await until(lambda steps=steps: engine.stats().steps >= min(steps + 20, 55))
        assert "".join(order) == made.text("slow", 60)

    run(scenario)


def test_a_dead_loop_ends_every_request_and_says_why(scripted: Scripted) -> None:
    """A crash must never leave a client hanging: running, waiting and later requests all get the reason."""
    made = scripted(max_num_seqs=2)

    def crash(step: Any) -> None:
        if made.executor.num_steps == 3:
            raise SystemExit("out of luck")

    made.executor.on_step = crash

    async def scenario() -> None:
        engine = await made.start()
        tasks = [collect(engine, f"prompt {i}", replace(GREEDY, max_tokens=100)) for i in range(5)]
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineError)
            assert "out of luck" in str(error)
        health = engine.health()
        assert health.phase is Phase.FAILED
        assert "out of luck" in health.reason
        with pytest.raises(EngineError, match="out of luck"):
            await collect(engine, "later")
        assert len(engine._live) == len(engine._live._processor) == 0

    run(scenario)


def test_draining_refuses_new_requests_and_finishes_the_running(scripted: Scripted) -> None:
    """C50: not ready at once, 503 for the new, whole texts for the old, and then the loop stops."""
    made = scripted()

    async def scenario() -> None:
        engine = await made.start()
        made.executor.gate = Semaphore(2)
        running = [asyncio.create_task(collect(engine, p)) for p in ("one", "two", "three")]
        await until(lambda: made.executor.num_steps == 2)
        drain = asyncio.create_task(engine.drain(30))
        await asyncio.sleep(0)
        assert engine.health().phase is Phase.DRAINING
        assert "3 requests" in engine.health().reason
        with pytest.raises(RequestError) as caught:
            await collect(engine, "late")
        assert caught.value.code is ErrorCode.SHUTTING_DOWN
        made.open_gate()
        for prompt, outputs in zip(("one", "two", "three"), await asyncio.gather(*running), strict=True):
            assert text_of(outputs) == made.text(prompt, 8)
        await drain
        assert engine.health().phase is Phase.DRAINING

    run(scenario)


def test_a_drain_that_runs_out_of_time_ends_the_rest_with_an_error(scripted: Scripted) -> None:
    """C50: at the time-out each remaining client hears SHUTTING_DOWN, even where the engine is stuck in a step."""
    made = scripted(max_num_seqs=1)

    async def scenario() -> None:
        engine = await made.start()
        made.executor.gate = Semaphore(0)
        running = [asyncio.create_task(collect(engine, p)) for p in ("stuck", "queued")]
        await until(lambda: len(engine._live) == 2)
        await engine.drain(0.01)
        for error in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(error, RequestError)
            assert error.code is ErrorCode.SHUTTING_DOWN

    run(scenario)


def test_a_request_caught_by_the_drain_while_it_is_encoded_is_refused(scripted: Scripted) -> None:
    """Encoding a long prompt takes a while in a thread: draining may begin meanwhile, and must not miss the request."""
    made = scripted(max_model_len=100_000, num_blocks=10_000)

    async def scenario() -> None:
        engine = await made.start()
        task = asyncio.create_task(collect(engine, "long " * 10_000))
        await asyncio.sleep(0)
        await engine.drain(0)
        with pytest.raises(RequestError) as caught:
            await task
        assert caught.value.code is ErrorCode.SHUTTING_DOWN

    run(scenario)


def test_an_engine_that_stops_stepping_is_not_ready(scripted: Scripted) -> None:
    """C51: live, but not ready, with the reason; idle time never counts; the next step ends it."""
    made = scripted()
    made.now = 1000.0

    async def scenario() -> None:
        engine = await made.start(stall_after_s=30)
        made.now = 5000.0
        assert engine.health().ready, "an engine without work does not stall"
        made.executor.gate = Semaphore(0)
        task = asyncio.create_task(collect(engine, "stuck"))
        await until(lambda: len(engine._live) == 1)
        made.now += 29
        assert engine.health().ready
        made.now += 2
        health = engine.health()
        assert health.phase is Phase.STALLED
        assert not health.ready
        assert "31 s with 1 requests" in health.reason
        made.executor.gate.release()
        await until(lambda: engine.health().ready)
        made.open_gate()
        await task

    run(scenario)


def test_not_ready_before_the_loop_says_so(scripted: Scripted) -> None:
    """C51: readiness before warm-up sends traffic to an engine that cannot answer."""
    made = scripted()

    async def scenario() -> None:
        engine = AsyncEngine(made.manifest, made.limits, made.tokenizer)
        assert engine.health().phase is Phase.STARTING
        assert engine.stats().kv_blocks_total == 64

    run(scenario)


def test_who_watches_health_hears_of_every_change(scripted: Scripted) -> None:
    """C51: without a poll, a change that is not told is never seen: a stalled engine would go on getting requests."""
    made = scripted()
    phases: list[Phase] = []

    async def scenario() -> None:
        engine = await made.start(stall_after_s=0.02)

        def changed() -> None:
            if engine.health().phase not in phases[-1:]:
                phases.append(engine.health().phase)

        engine.watch_health(changed)
        made.executor.gate = Semaphore(0)
        task = asyncio.create_task(collect(engine, "stuck"))
        await until(lambda: phases == [Phase.STALLED])
        made.open_gate()
        await task
        assert phases == [Phase.STALLED, Phase.READY]
        made.executor.gate = Semaphore(0)
        task = asyncio.create_task(collect(engine, "stuck again"))
        await until(lambda: phases[2:] == [Phase.STALLED])
        task.cancel()
        await until(lambda: phases[3:] == [Phase.READY])
        made.open_gate()
        await engine.drain(0)
        assert phases[4:] == [Phase.DRAINING]

    run(scenario)


def test_an_idle_engine_has_no_timer(scripted: Scripted) -> None:
    """The watch for a stall, and the deadline, end with the last request: an idle process sleeps."""
    made = scripted()

    async def scenario() -> None:
        engine = await made.start()
        others = set(timers())
        made.executor.gate = Semaphore(0)
        task = asyncio.create_task(collect(engine, "one", timeout_s=1000))
        await until(lambda: bool(engine._live))
        assert len(timers()) > len(others)
        made.open_gate()
        await task
        await settled(made, engine)
        assert set(timers()) == others

    def timers() -> list[Any]:
        return [t for t in cast(Any, asyncio.get_running_loop())._scheduled if not t.cancelled()]

    run(scenario)
