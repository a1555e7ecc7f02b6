"""Steps that fail with another in flight behind them: that one is dropped, and nobody but the guilty sees anything."""

import numpy as np
import pytest

from castline.engines.errors import EngineError, ErrorCode
from castline.runtime.events import FinishReason
from castline.runtime.sampler_api import UNSOUND_LOGITS

EAGER = pytest.mark.parametrize("eager", [False, True])


@pytest.fixture
def run_three(make_device_engine):
    """Three sampled texts; *prepare* spoils the engine before they run."""

    def run(prepare=None, **options):
        engine = make_device_engine(max_num_batched_tokens=64, **options)
        if prepare is not None:
            prepare(engine)
        for place in range(3):
            engine.add(f"r{place}", [place, 1, 2], max_tokens=30, temperature=4.0, seed=place, ignore_eos=True)
        engine.run()
        engine.assert_forgotten()
        return engine

    return run


@EAGER
@pytest.mark.parametrize("failing", [{1}, {2}, {3}, {10}, {4, 9, 14}, {29}])
def test_a_step_that_fails_once_ends_nobody(run_three, answers, failing, eager):
    """The step behind it has gone on from garbage: its tokens must not be taken, nor its random numbers lost."""

    def fail_some(engine) -> None:
        def fail(step) -> None:
            if len(engine.executor.num_tokens) + fail.count + 1 in failing and len(step.kv_lens) == 3:
                fail.count += 1
                raise EngineError("sometimes")

        fail.count = 0
        engine.executor.fail = fail

    engine = run_three(fail_some, eager=eager)
    assert engine.executor.fail.count == len(failing)
    assert answers(engine) == answers(run_three(device=False))


@EAGER
def test_a_request_that_breaks_a_step_ends_alone(run_three, answers, eager):
    """Token 95 cannot be computed, and the step that computes it is in flight before anyone has seen it."""
    healthy = run_three(device=False)
    victim = {place: healthy.tokens(f"r{place}") for place in range(3)}
    poison = victim[1][12]
    first = {place: tokens.index(poison) for place, tokens in victim.items() if poison in tokens}

    def fail_always(engine) -> None:
        def fail(step) -> None:
            if poison in step.input_ids.tolist():
                raise EngineError("the device says no")

        engine.executor.fail = fail

    engine = run_three(fail_always, eager=eager)
    for place in range(3):
        tokens, finish = engine.tokens(f"r{place}"), engine.finish(f"r{place}")
        if place in first and first[place] < 29:
            assert tokens == victim[place][: first[place] + 1]
            assert (finish.reason, finish.message) == (FinishReason.ERROR, "the device says no")
        else:
            assert (tokens, finish.reason) == (victim[place], FinishReason.LENGTH)
    assert engine.device.num_ahead > 10


def test_nothing_runs_ahead_of_suspects(run_three):
    """What broke a step is found out one step at a time."""
    seen = []

    def fail_once(engine) -> None:
        def fail(step) -> None:
            if len(engine.executor.num_tokens) == 9 and not seen:
                seen.append(engine.device.num_steps)
                raise EngineError("once")

        submit = engine.device.submit

        def observed(step):
            if step.continues is not None:
                assert not engine.core._suspects
            return submit(step)

        engine.executor.fail, engine.device.submit = fail, observed

    engine = run_three(fail_once)
    assert seen
    assert not engine.device.faults
    sizes = [len(plan.scheduled) for plan in engine.plans]
    assert sizes[-3:] == [1, 2, 3], "the failed step's halves, then all again"


@EAGER
def test_a_step_that_is_refused_ahead_is_tried_in_its_turn(run_three, answers, eager):
    """A submission that fails while another step is in flight must not take that one with it."""

    def refuse_some(engine) -> None:
        def refuse(step) -> None:
            if step.continues is not None and engine.device.num_steps % 4 == 0:
                refuse.count += 1
                raise EngineError("not now")

        refuse.count = 0
        engine.device.refuse = refuse

    engine = run_three(refuse_some, eager=eager)
    assert engine.device.refuse.count > 5
    assert answers(engine) == answers(run_three(device=False))


def test_a_dead_device_ends_every_request_and_no_loop(make_device_engine):
    """When every step fails, every request must be told, in a bounded number of steps, and the engine must recover."""
    engine = make_device_engine()

    def fail(step) -> None:
        raise EngineError("gone")

    for number in range(6):
        engine.add(f"r{number}", [number, 1, 2], max_tokens=50, ignore_eos=True)
    for _ in range(8):
        engine.step()
    assert engine.device.num_in_flight == 1
    engine.executor.fail = fail
    engine.run(max_steps=100)
    assert all(engine.finish(f"r{number}").message == "gone" for number in range(6))
    engine.assert_forgotten()
    engine.executor.fail = None
    engine.add("next", range(5), max_tokens=3)
    engine.run()
    assert engine.tokens("next") == engine.expected("next", 3)


@EAGER
@pytest.mark.parametrize("length", [12, 13, 20])
def test_a_row_of_nan_ends_one_sequence_and_is_not_found(make_device_engine, eager, length):
    """A device says it by a token that is none; the step in flight goes on from it, and its row is nobody's."""
    engine = make_device_engine(eager=eager, max_num_batched_tokens=64, block_size=2)
    bad = 50

    def break_one(tensors, logits: np.ndarray) -> None:
        for number, kv_len in enumerate(tensors.kv_lens.tolist()):
            first = tensors.block_table[number, 0] * 2
            if kv_len == length and engine.executor.slots[first] == bad:
                logits[number] = np.nan

    engine.device.break_logits = break_one
    engine.add("a", range(10), max_tokens=20, ignore_eos=True)
    engine.add("bad", [bad, *range(9)], max_tokens=20, ignore_eos=True)
    engine.run()
    finish = engine.finish("bad")
    assert (finish.error_code, finish.message) == (ErrorCode.ENGINE_FAILED, UNSOUND_LOGITS)
    assert engine.tokens("bad") == engine.expected("bad", length - 10)
    assert engine.tokens("a") == engine.expected("a", 20)
    engine.device.break_logits = None
    engine.add("again", [bad, *range(9), *engine.tokens("bad"), 1], max_tokens=4)
    engine.run()
    assert engine.first_event("again").cached_tokens == (length - 1) // 2 * 2, "the step that broke is not found"
    assert engine.tokens("again") == engine.expected("again", 4)
    assert not engine.device.faults


def test_a_request_the_sampler_refuses_ends_alone(make_device_engine):
    """Whatever a request holds, it must not stop the engine."""
    engine = make_device_engine(max_num_batched_tokens=64)
    add = engine.sampler.add

    def add_or_refuse(seq_key, params, prompt_token_ids, index):
        if params.top_k == 13:
            raise ValueError("top_k 13 brings bad luck")
        add(seq_key, params, prompt_token_ids, index)

    engine.sampler.add = add_or_refuse
    engine.add("a", range(10), max_tokens=4)
    engine.add("bad", range(50, 62), max_tokens=4, top_k=13)
    engine.run()
    assert engine.finish("bad").message == "top_k 13 brings bad luck"
    assert engine.tokens("a") == engine.expected("a", 4)
    engine.assert_forgotten()
