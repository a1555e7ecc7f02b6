"""The engine on a device that samples, a step ahead, gives what it gives where the host samples step by step."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from castline.engines.errors import ErrorCode
from castline.runtime.events import FinishReason

EOS = 96
EAGER = pytest.mark.parametrize("eager", [False, True])

OPTIONS = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([0, 1, 2, 7, 25, 40])},
    optional={
        "n": st.sampled_from([1, 3]),
        "stop_token_ids": st.sampled_from([(0, 1, 2, 3), tuple(range(10, 40))]),
        "ignore_eos": st.just(True),
        "cache_salt": st.just("s"),
    },
)
HOSTED = st.sampled_from(
    [
        {},
        {},
        {},
        {"logprobs": 2},
        {"prompt_logprobs": 0},
        {"min_tokens": 3},
        {"logit_bias": {0: 20.0, 1: -100.0}},
        {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.1},
    ]
)
SAMPLING = st.sampled_from(
    [
        {},
        {"temperature": 4.0, "seed": 5},
        {"temperature": 5.0, "seed": 8, "top_k": 40, "top_p": 0.95},
        {"temperature": 3.0, "seed": 9, "min_p": 0.01},
    ]
)
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def serve(make, requests, *, steps_between=1, memory=None, **limits):
    """Runs *requests* (prompt, params)."""
    engine = make(max_model_len=60, **limits)
    engine.model.memory = memory
    engine.model.scripted = {33: EOS, 47: EOS}
    for place, (prompt, params) in enumerate(requests):
        params = {key: value for key, value in params.items() if (key, params["max_tokens"]) != ("min_tokens", 0)}
        engine.add(f"r{place}", prompt, **params)
        for _ in range(steps_between):
            engine.step()
    engine.run()
    engine.assert_forgotten()
    return engine


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requests=st.lists(st.tuples(PROMPTS, OPTIONS, HOSTED, SAMPLING), min_size=1, max_size=6),
    num_blocks=st.sampled_from([16, 30, 100]),
    budget=st.sampled_from([6, 15, 64]),
    max_num_seqs=st.sampled_from([2, 6]),
    memory=st.sampled_from([None, 2]),
    steps_between=st.integers(0, 3),
    eager=st.booleans(),
)
def test_same_answers(
    make_device_engine, answers, requests, num_blocks, budget, max_num_seqs, memory, steps_between, eager
):
    """Greedy or sampled, edited, reported or not, alone or beside others, through chunks, hits, forks and preemption:
    tokens, log-probabilities and endings are those of one step after the other."""
    requests = [(prompt, {**options, **hosted, **sampling}) for prompt, options, hosted, sampling in requests]
    limits = {
        "num_blocks": num_blocks,
        "max_num_batched_tokens": budget,
        "max_num_seqs": max_num_seqs,
        "memory": memory,
        "steps_between": steps_between,
    }
    ahead = serve(make_device_engine, requests, eager=eager, **limits)
    plain = serve(make_device_engine, requests, device=False, **limits)
    assert answers(ahead) == answers(plain)
    stats, expected = ahead.core.stats(), plain.core.stats()
    assert stats.generation_tokens == expected.generation_tokens
    assert stats.prompt_tokens == expected.prompt_tokens
    assert ahead.device.num_in_flight == 0


@EAGER
@pytest.mark.parametrize("size", [1, 8])
def test_a_steady_decode_keeps_the_device_busy(make_device_engine, size, eager):
    """All of this is for this: while the host works, the device has a step to compute. No logits cross the bus, each
    call commits one step, and none is computed for nothing."""
    engine = make_device_engine(eager=eager, max_model_len=120, num_blocks=400, max_num_batched_tokens=64)
    for place in range(size):
        engine.add(f"r{place}", [place, 1, 2], max_tokens=100, temperature=4.0, seed=place, ignore_eos=True)
    engine.run()
    device = engine.device
    assert engine.core.stats().steps == device.num_steps == 100
    assert device.num_ahead == sum(device.kept_busy) == 99
    assert device.num_wanted == 0
    assert all(len(engine.tokens(f"r{place}")) == 100 for place in range(size))


@EAGER
def test_run_ahead_goes_on_while_others_end(make_device_engine, answers, eager):
    """Texts that a token ends must neither stop the others nor leave a trace; that they end was not known."""
    requests = [
        ([n, 1, 2], {"max_tokens": 80, "temperature": 5.0, "seed": n, "stop_token_ids": tuple(range(n))})
        for n in range(8)
    ]
    limits = {"num_blocks": 200, "max_num_batched_tokens": 64, "steps_between": 0}
    engine = serve(make_device_engine, requests, eager=eager, **limits)
    assert answers(engine) == answers(serve(make_device_engine, requests, device=False, **limits))
    stopped = [engine.finish(f"r{n}").reason is FinishReason.STOP for n in range(8)]
    assert sum(stopped) > 3
    assert engine.device.num_ahead > 0.9 * engine.device.num_steps


@EAGER
def test_logits_stop_the_run_ahead_only_while_they_are_wanted(make_device_engine, answers, eager, caplog):
    """A request that reports log-probabilities holds the others up; when it has ended they run ahead again."""
    requests = [
        ([1, 2, 3], {"max_tokens": 50, "temperature": 3.0, "seed": 1, "ignore_eos": True}),
        ([4, 5, 6], {"max_tokens": 10, "temperature": 3.0, "seed": 2, "ignore_eos": True, "logprobs": 1}),
        ([7, 8, 9], {"max_tokens": 20, "temperature": 3.0, "seed": 3, "min_tokens": 15}),
    ]
    limits = {"num_blocks": 100, "max_num_batched_tokens": 64, "steps_between": 0}
    engine = serve(make_device_engine, requests, eager=eager, **limits)
    assert answers(engine) == answers(serve(make_device_engine, requests, device=False, **limits))
    assert engine.device.num_wanted == 10 + 15
    assert engine.device.num_ahead == 50 - 16, "from the sixteenth step on"
    assert not caplog.records, "nothing is tried that cannot be"


@EAGER
def test_a_newcomer_waits_for_one_step_at_most(make_device_engine, eager):
    """The step in flight was planned without it; the next one must not be."""
    engine = make_device_engine(eager=eager)
    engine.add("a", range(4), max_tokens=50, ignore_eos=True)
    for _ in range(5):
        engine.step()
    assert engine.device.num_in_flight == 1
    engine.add("b", range(10, 14), max_tokens=3, ignore_eos=True)
    engine.step()
    assert engine.device.num_in_flight == 0, "nothing may be begun while someone can be admitted"
    engine.step()
    assert [event.request_id for event in engine.events[-2:]] == ["a", "b"]


def test_who_cannot_be_admitted_holds_nobody_up(make_device_engine):
    """A full engine is where run-ahead counts most, and there someone always waits."""
    engine = make_device_engine(max_num_seqs=2)
    for name in "abc":
        engine.add(name, [*range(4)], max_tokens=40, ignore_eos=True)
    engine.run()
    assert len(engine.tokens("c")) == 40
    assert engine.device.num_ahead > 0.9 * engine.device.num_steps


@EAGER
@pytest.mark.parametrize("steps_before", range(14))
def test_abort_with_a_step_in_flight(make_device_engine, steps_before, eager):
    """C46: blocks are free at once and may be taken at once; nobody reads what the step in flight still writes."""
    limits = {"max_num_batched_tokens": 8, "block_size": 2, "num_blocks": 64}
    engine, plain = (make_device_engine(device=device, **limits) for device in (True, False))
    engine.device.eager = eager
    for each in (engine, plain):
        each.add("other", range(60, 70), max_tokens=40, ignore_eos=True)
        each.add("r", range(30), max_tokens=50, n=2, ignore_eos=True)
        for _ in range(steps_before):
            each.step()
        used = [len(seq.block_ids) for seq in each.core.scheduler.groups["other"].members.values()]
        each.core.abort("r")
        assert each.core.stats().kv_blocks_used == sum(used)
        each.add("next", range(30), max_tokens=20, temperature=3.0, seed=1, ignore_eos=True)
        each.run()
        each.assert_forgotten()
        assert each.finish("r", 1).reason is FinishReason.ABORT
    for name in ("other", "next"):
        assert engine.tokens(name) == plain.tokens(name)


@EAGER
def test_a_text_that_a_token_ended_is_a_prefix_like_any_other(make_device_engine, eager):
    """The step in flight wrote behind its end: nothing of that may be found, and what was confirmed must be."""
    engine, plain = (make_device_engine(device=device, block_size=2) for device in (True, False))
    engine.device.eager = eager
    for each in (engine, plain):
        each.model.scripted = {9: EOS, 10: EOS}
        for name, prompt in (("a", [1, 2, 3]), ("b", [1, 2, 3, 4])):
            each.add(name, prompt, max_tokens=30)
            each.run()
        each.model.scripted = {}
        for name in "ab":
            whole = (*each.requests[name].prompt_token_ids, *each.tokens(name))
            assert whole[-1] == EOS
            each.add(f"{name}-again", [*whole, 5, 6], max_tokens=10)
            each.add(f"{name}-other", [*whole[:-1], 7], max_tokens=10)
        each.run()
    for name in ("a", "b", "a-again", "b-again", "a-other", "b-other"):
        assert engine.tokens(name) == plain.tokens(name)
        assert engine.first_event(name).cached_tokens == plain.first_event(name).cached_tokens
    assert engine.first_event("a-again").cached_tokens == 8
    assert engine.device.num_ahead > 10


@EAGER
def test_nothing_stays_in_flight(make_device_engine, eager):
    """A step whose sequences have all ended is still work, until it was collected: before idle and before close."""
    engine = make_device_engine(eager=eager)
    engine.model.scripted = {10: EOS}
    engine.add("r", range(4), max_tokens=50)
    while not any(event.finish for event in engine.events):
        engine.step()
    assert engine.device.num_in_flight == 1, "the end was not known"
    assert engine.core.has_work
    assert engine.step() == []
    assert not engine.core.has_work
    engine.device.close()
    engine.assert_forgotten()
    engine.add("s", range(4), max_tokens=50, ignore_eos=True)
    for _ in range(5):
        engine.step()
    assert engine.device.num_in_flight == 1
    engine.core.close()
    engine.device.close()


@EAGER
def test_deadlines_with_a_step_in_flight(make_device_engine, eager):
    """The tokens of a step that was under way when time ran out are not reported; the others go on with it."""
    engine = make_device_engine(eager=eager)
    engine.add("short", range(4), max_tokens=50, deadline=105.0, ignore_eos=True)
    engine.add("long", range(10, 14), max_tokens=30, ignore_eos=True)
    for _ in range(6):
        engine.step()
    engine.clock.now = 106.0
    engine.run()
    assert engine.finish("short").error_code is ErrorCode.DEADLINE_EXCEEDED
    assert engine.tokens("short") == engine.expected("short", 6)
    assert engine.tokens("long") == engine.expected("long", 30)
    assert engine.device.num_steps == 30, "no step was thrown away"
    engine.assert_forgotten()


def test_waiting_for_the_device_is_timed(make_device_engine):
    """A device that samples has its forward pass while the host goes on: what the host waits for is what is left."""
    engine = make_device_engine()

    def take_time(_):
        engine.clock.now += 0.25

    engine.executor.fail = take_time  # a step of this device runs when it is waited for
    engine.add("r", range(6), max_tokens=3)
    while engine.core.has_work:
        engine.step()
    assert engine.core.stats().executor_s == 0.25 * engine.device.num_steps > 0
