"""Steps that fail: the step is rolled back, the request at fault ends alone, and the engine lives on."""

import random

import numpy as np
import pytest

from castline.engines.errors import EngineError, ErrorCode
from castline.runtime.events import FinishReason
from castline.runtime.sampler_api import BrokenLogits


def poison(engine, token: int):
    """Every step that computes *token* fails, after the pool has been written."""

    def fail(step) -> None:
        if token in step.input_ids.tolist():
            raise EngineError("the device says no")

    engine.executor.fail = fail


@pytest.mark.parametrize("num_neighbours", [0, 1, 7])
def test_a_failing_request_ends_alone(make_engine, num_neighbours):
    """One request must not take its batch down: the neighbours' tokens are those of a healthy engine."""
    engine = make_engine(max_num_batched_tokens=64)
    for number in range(num_neighbours):
        engine.add(f"r{number}", [number, 1, 2, 3, 4], max_tokens=5, n=1 + number % 2)
    engine.add("bad", [1, 2, 95], max_tokens=5)
    poison(engine, 95)
    engine.run()
    finish = engine.finish("bad")
    assert (finish.reason, finish.error_code) == (FinishReason.ERROR, ErrorCode.ENGINE_FAILED)
    assert finish.message == "the device says no"
    for number in range(num_neighbours):
        for index in range(1 + number % 2):
            assert engine.tokens(f"r{number}", index) == engine.expected(f"r{number}", 5, index)
    engine.assert_forgotten()


def test_a_step_that_fails_once_ends_nobody(make_engine):
    """A passing fault costs a step; sequences with copied blocks and fresh prompts must survive the rollback."""
    engine = make_engine(max_num_batched_tokens=16, block_size=4)
    failures = iter(range(100))

    def fail(step) -> None:
        if next(failures) % 3 == 0:
            raise MemoryError

    engine.executor.fail = fail
    engine.add("a", range(10), max_tokens=6, n=3)
    engine.add("b", range(20, 45), max_tokens=6)
    while engine.core.has_work:
        engine.step()
        if len(engine.plans) > 3 and len(engine.plans[-1].scheduled) == 1:
            engine.executor.fail = None  # alone, a failure would end it
    for index in range(3):
        assert engine.tokens("a", index) == engine.expected("a", 6, index)
    assert engine.tokens("b") == engine.expected("b", 6)


def test_suspects_that_are_aborted_are_forgotten(make_engine):
    """Ids of sequences that have gone must not pile up, nor hold back the requests that come after."""
    engine = make_engine()
    for number in range(4):
        engine.add(f"r{number}", [number, 1, 2, 95], max_tokens=5)
    poison(engine, 95)
    engine.step()
    for number in range(4):
        engine.core.abort(f"r{number}")
    engine.step()
    engine.assert_forgotten()
    engine.add("next", range(5), max_tokens=3)
    engine.run()
    assert engine.tokens("next") == engine.expected("next", 3)


def test_a_dead_device_ends_every_request_and_no_loop(make_engine):
    """When every step fails, every request must be told, in a bounded number of steps."""
    engine = make_engine()

    def fail(step) -> None:
        raise EngineError("gone")

    engine.executor.fail = fail
    for number in range(20):
        engine.add(f"r{number}", [number, 1, 2], max_tokens=5)
    engine.run(max_steps=100)
    assert all(engine.finish(f"r{number}").reason is FinishReason.ERROR for number in range(20))
    engine.assert_forgotten()
    engine.executor.fail = None
    engine.add("next", range(5), max_tokens=3)
    engine.run()
    assert engine.tokens("next") == engine.expected("next", 3)


def test_failures_and_aborts_together(make_engine):
    """Suspects that are aborted or preempted before their turn must neither be run nor waited for."""
    rng = random.Random(5)
    engine = make_engine(num_blocks=20, max_model_len=40, max_num_seqs=6, max_num_batched_tokens=12)
    engine.executor.fail = lambda step: fail_sometimes(rng)
    for number in range(120):
        prompt = [rng.randint(0, 3) for _ in range(rng.randint(1, 18))]
        engine.add(f"r{number}", prompt, max_tokens=15, n=1 + number % 2)
        for _ in range(rng.randint(0, 3)):
            engine.step()
        if rng.random() < 0.3:
            engine.core.abort(f"r{rng.randint(0, number)}")
    engine.run()
    reasons = set()
    for request_id, request in engine.requests.items():
        for index in range(request.params.n):
            reasons.add(engine.finish(request_id, index).reason)
            tokens = engine.tokens(request_id, index)
            assert tokens == engine.expected(request_id, len(tokens), index)
    assert reasons == {FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR}
    engine.assert_forgotten()


def fail_sometimes(rng: random.Random) -> None:
    if rng.random() < 0.3:
        raise EngineError("sometimes")


def test_a_sequence_with_broken_logits_ends_alone_and_its_blocks_are_not_found(make_engine):
    """NaN in one row is that sequence's end; its KV is NaN too, and must not become another's prefix."""
    engine = make_engine(max_num_batched_tokens=64, block_size=4)
    sample = engine.sampler.sample

    def sample_or_break(logits: np.ndarray, seq_keys, maxima=None):
        broken = {key: "NaN" for key in seq_keys if engine.core.scheduler.get(key).group.request.request_id == "bad"}
        if broken:
            raise BrokenLogits(broken)
        return sample(logits, seq_keys)

    engine.sampler.sample = sample_or_break
    engine.add("a", range(10), max_tokens=4)
    engine.add("bad", range(50, 62), max_tokens=4)
    engine.add("b", range(20, 30), max_tokens=4)
    engine.run()
    assert engine.finish("bad").message == "NaN"
    for request_id in "ab":
        assert engine.tokens(request_id) == engine.expected(request_id, 4)
    assert len(engine.executor.num_tokens) == 4, "no step was repeated"
    engine.sampler.sample = sample
    engine.add("again", range(50, 62), max_tokens=4)
    engine.run()
    assert engine.first_event("again").cached_tokens == 0


def test_a_request_the_sampler_refuses_ends_alone(make_engine):
    """Whatever a request holds, it must not stop the engine."""
    engine = make_engine(max_num_batched_tokens=64)
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


def test_a_leaked_block_is_logged_when_the_engine_falls_idle(make_engine, caplog):
    """Blocks that are lost one by one must be known before the pool is empty; the requests are served all the same."""
    engine = make_engine()
    engine.add("r", range(5), max_tokens=2)
    engine.run()
    assert not caplog.records
    engine.core.scheduler.kv.pool.allocate()
    engine.add("next", range(20, 25), max_tokens=2)
    while engine.core.has_work:
        engine.events += engine.core.step()
    assert engine.tokens("next") == engine.expected("next", 2)
    assert "blocks in use, though no sequence lives: 1" in caplog.text


def test_falling_idle_takes_no_time_with_the_size_of_the_pool(make_engine, monkeypatch):
    """The last token of a lone request waits for it, on every request: half a second with a large GPU's blocks."""
    engine = make_engine()
    pool, cache = engine.core.scheduler.kv.pool, engine.core.scheduler.kv.cache
    walks: list[str] = []
    monkeypatch.setattr(pool, "check", lambda tables: walks.append("pool"))
    monkeypatch.setattr(cache, "check", lambda: walks.append("cache"))
    for request_id in "ab":
        engine.add(request_id, range(9), max_tokens=2)
        while engine.core.has_work:
            engine.events += engine.core.step()
        assert engine.tokens(request_id) == engine.expected(request_id, 2)
    assert walks == []
    engine.core.scheduler.check()
    assert walks == ["pool", "cache"], "the full check still walks both"
