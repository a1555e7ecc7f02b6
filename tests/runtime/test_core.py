"""The engine core's promises to the loop around it: events, aborts, deadlines, failures."""

import random

import pytest

from castline.engines.errors import ErrorCode
from castline.runtime.events import FinishReason


def test_one_event_a_token_and_the_first_carries_the_prompt(make_engine):
    """A stream must get each token when it is known, and cached_tokens exactly once."""
    engine = make_engine()
    engine.add("r", range(10), max_tokens=4, logprobs=2)
    engine.run()
    assert [len(event.token_ids) for event in engine.events] == [1, 1, 1, 1]
    assert [event.cached_tokens for event in engine.events] == [0, None, None, None]
    assert [[entry.token_id for entry in event.logprobs] for event in engine.events] == [
        list(event.token_ids) for event in engine.events
    ]
    assert engine.finish("r").reason is FinishReason.LENGTH


def test_queue_time_ends_with_the_first_step_of_a_request(make_engine):
    """Neither the time of its prompt, which is the engine's work, nor that of a later preemption is waiting."""
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=4)
    engine.add("a", range(2), max_tokens=2)
    engine.add("b", range(10, 20), max_tokens=2)
    while engine.core.has_work:
        engine.clock.now += 1
        engine.step()
    times = {event.request_id: event.queue_s for event in engine.events if event.queue_s is not None}
    assert times == {"a": 1, "b": 3}
    assert [event.queue_s is not None for event in engine.events] == [True, False, True, False]


def test_forward_passes_are_timed(make_engine):
    """What an engine spends beside them is told from the rest: /metrics has both."""
    engine = make_engine(max_num_batched_tokens=4)
    engine.executor.fail = lambda _: setattr(engine.clock, "now", engine.clock.now + 0.25)
    engine.add("r", range(6), max_tokens=3)
    while engine.core.has_work:
        engine.clock.now += 10
        engine.step()
    assert engine.core.stats().executor_s == 0.25 * 4


def test_no_logprobs_unless_asked(make_engine):
    """An empty list would read as log-probabilities that got lost."""
    engine = make_engine()
    engine.add("r", range(10), max_tokens=2)
    engine.run()
    assert {event.logprobs for event in engine.events} == {None}
    assert {event.prompt_logprobs for event in engine.events} == {None}


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("prompt_len", [1, 2, 12, 13])
def test_prompt_logprobs(make_engine, prompt_len, budget):
    """C15, C34: one entry a prompt token, the first None, each from its own row, however chunked or cached."""
    engine = make_engine(max_num_batched_tokens=budget, block_size=4)
    engine.add("warm", range(prompt_len), max_tokens=1)
    engine.run()
    engine.add("r", range(prompt_len), max_tokens=2, prompt_logprobs=0)
    engine.run()
    event = engine.first_event("r")
    assert event.cached_tokens == 0
    assert event.prompt_logprobs[0] is None
    entries = event.prompt_logprobs[1:]
    assert [entry.token_id for entry in entries] == list(range(1, prompt_len))
    assert [entry.rank for entry in entries] == [engine.model.next_token(range(n)) for n in range(1, prompt_len)]
    assert engine.tokens("r") == engine.expected("r", 2)


def test_prompt_logprobs_survive_preemption(make_engine):
    """A prompt computed twice must not have entries twice."""
    engine = make_engine(num_blocks=14, block_size=4, max_model_len=40, max_num_batched_tokens=8)
    engine.add("a", range(4), max_tokens=36)
    engine.step()
    engine.add("r", range(30, 66), max_tokens=3, prompt_logprobs=1)
    engine.run()
    assert engine.core.stats().preemptions > 0
    entries = engine.first_event("r").prompt_logprobs
    assert [entry.token_id for entry in entries[1:]] == list(range(31, 66))


@pytest.mark.parametrize("prompt_len", [1, 8, 40])
def test_max_tokens_zero_computes_the_prompt_only(make_engine, prompt_len):
    """C34: echo with logprobs needs the prompt's rows and not one token more."""
    engine = make_engine(max_model_len=40)
    engine.add("r", range(prompt_len), max_tokens=0, prompt_logprobs=1, n=2)
    engine.add("bare", range(prompt_len), max_tokens=0)
    engine.run()
    for index in range(2):
        assert engine.finish("r", index).reason is FinishReason.LENGTH
        assert engine.tokens("r", index) == ()
    assert len(engine.first_event("r", 0).prompt_logprobs) == prompt_len
    assert engine.first_event("r", 1).prompt_logprobs is None, "told once"
    assert engine.finish("bare").reason is FinishReason.LENGTH
    assert engine.core.stats().generation_tokens == 0
    engine.assert_forgotten()


@pytest.mark.parametrize("steps_before", range(12))
def test_abort_at_any_moment_gives_every_block_back(make_engine, steps_before):
    """C46: queued, half way through its prompt, before and after the fork, decoding, finished."""
    engine = make_engine(max_num_batched_tokens=8, block_size=4)
    engine.add("other", range(60, 70), max_tokens=40)
    engine.add("r", range(30), max_tokens=6, n=2)
    for _ in range(steps_before):
        engine.step()
    used = {seq.seq_id: len(seq.block_ids) for seq in engine.core.scheduler.groups["other"].members.values()}
    engine.core.abort("r")
    assert engine.core.stats().kv_blocks_used == sum(used.values()), "blocks are free at once, not a step later"
    engine.step()
    for index in range(2):
        engine.finish("r", index)
    engine.run()
    assert engine.tokens("other") == engine.expected("other", 40)
    engine.assert_forgotten()


def test_abort_of_unknown_requests_and_indices_is_ignored(make_engine):
    """A client's cancel crosses the end of its request on the wire."""
    engine = make_engine()
    engine.core.abort("nobody")
    engine.add("r", range(5), max_tokens=2)
    engine.core.abort("r", 7)
    engine.run()
    engine.core.abort("r")
    assert not engine.core.has_work
    assert engine.finish("r").reason is FinishReason.LENGTH


def test_abort_reports_even_when_nothing_else_runs(make_engine):
    """The loop sleeps while there is no work: an event still to be told counts as work."""
    engine = make_engine()
    engine.add("r", range(5))
    engine.core.abort("r")
    assert engine.core.has_work
    (event,) = engine.step()
    assert event.finish.reason is FinishReason.ABORT
    assert not engine.core.has_work
    assert engine.executor.num_tokens == []


def test_random_aborts(make_engine):
    """C19: aborts at random moments, with n, logprobs and preemption: one terminal event each, and the engine lives."""
    rng = random.Random(19)
    engine = make_engine(num_blocks=24, max_model_len=64, max_num_batched_tokens=12, max_num_seqs=5)
    for number in range(150):
        prompt = [rng.randint(0, 2) for _ in range(rng.randint(1, 30))]
        n = rng.choice([1, 1, 3])
        engine.add(f"r{number}", prompt, n=n, max_tokens=rng.randint(1, 30), logprobs=rng.choice([None, 0, 2]))
        for _ in range(rng.randint(0, 4)):
            engine.step()
            if rng.random() < 0.2:
                engine.core.abort(f"r{rng.randint(0, number)}", rng.choice([None, 0, 1]))
    engine.run()
    assert engine.core.stats().preemptions > 0
    for request_id, request in engine.requests.items():
        for index in range(request.params.n):
            finish = engine.finish(request_id, index)
            tokens = engine.tokens(request_id, index)
            assert tokens == engine.expected(request_id, len(tokens), index)
            assert finish.reason is FinishReason.ABORT or len(tokens) == request.params.max_tokens
    engine.assert_forgotten()


def test_deadlines(make_engine):
    """A request past its deadline ends wherever it stands, waiting or running, and nothing else does."""
    engine = make_engine(max_num_seqs=1)
    engine.add("running", range(5), max_tokens=50, deadline=110.0)
    engine.add("waiting", range(5), max_tokens=50, deadline=105.0, n=2)
    engine.add("patient", range(5), max_tokens=3, deadline=1000.0)
    engine.step()
    engine.clock.now = 104.9
    engine.step()
    assert not any(event.finish for event in engine.events)
    engine.clock.now = 105.0
    engine.step()
    for index in range(2):
        finish = engine.finish("waiting", index)
        assert (finish.reason, finish.error_code) == (FinishReason.ERROR, ErrorCode.DEADLINE_EXCEEDED)
    engine.clock.now = 111.0
    engine.run()
    assert engine.finish("running").error_code is ErrorCode.DEADLINE_EXCEEDED
    assert engine.tokens("running") == engine.expected("running", 3)
    assert engine.tokens("patient") == engine.expected("patient", 3)
    engine.assert_forgotten()


def test_stats(make_engine):
    """Gauges of an idle engine are zero, counters count each thing once."""
    engine = make_engine(max_num_seqs=1)
    engine.add("a", range(8), max_tokens=3)
    engine.add("b", range(8), max_tokens=3)
    engine.step()
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used, stats.kv_blocks_total) == (1, 1, 2, 64)
    engine.run()
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert (stats.prompt_tokens, stats.generation_tokens) == (16, 6)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (16, 4)
    assert stats.steps == len(engine.executor.num_tokens) == 6
