"""The engine with guesses gives what it gives without: tokens, log-probabilities, endings, usage, and clean blocks."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from castline.engines.errors import EngineError, ErrorCode
from castline.runtime.events import FinishReason
from castline.runtime.sampler import Sampler
from castline.runtime.sampler_api import BrokenLogits

EOS = 96
LOOP = (1, 2, 3, 4) * 3

OPTIONS = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([1, 2, 7, 30])},
    optional={
        "n": st.sampled_from([1, 3]),
        "logprobs": st.sampled_from([0, 2]),
        "prompt_logprobs": st.just(0),
        "stop_token_ids": st.sampled_from([(0,), (1, 2)]),
        "min_tokens": st.just(1),
        "ignore_eos": st.just(True),
        "cache_salt": st.just("s"),
    },
)
SAMPLING = st.sampled_from(
    [
        {},
        {"temperature": 1.6, "seed": 5},
        {"temperature": 2.0, "seed": 8, "top_k": 4, "top_p": 0.9},
        {"temperature": 1.4, "seed": 6, "repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.1},
        {"logit_bias": {0: 20.0, 1: -100.0}},
        {"frequency_penalty": 0.4, "logit_bias": {2: 1.0}},
    ]
)
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def answers(engine) -> dict:
    """Everything a client sees, but how the tokens were spread over events and what the cache held."""
    seen = {}
    for request_id, request in engine.requests.items():
        for index in range(request.params.n):
            events = [e for e in engine.events if (e.request_id, e.index) == (request_id, index)]
            assert all(e.logprobs is None or len(e.logprobs) == len(e.token_ids) for e in events)
            logprobs = [entry for e in events for entry in e.logprobs or ()]
            prompt = events[0].prompt_logprobs
            seen[request_id, index] = (
                engine.tokens(request_id, index),
                engine.finish(request_id, index),
                logprobs,
                prompt,
            )
    return seen


def serve(make_engine, requests, max_drafts, *, memory=1, step_between=True, fails=(), **limits):
    """Runs *requests* (prompt, params); the executions numbered in *fails* fail after the pool was written.

    Those that compute one token do not: that would end a sequence.
    """
    engine = make_engine(max_drafts=max_drafts, max_model_len=60, **limits)
    engine.model.memory = memory
    engine.model.scripted = {33: EOS, 47: EOS}
    count = 0

    def fail(step) -> None:
        nonlocal count
        count += 1
        if count in fails and len(step.input_ids) > 1:
            raise EngineError("sometimes")

    engine.executor.fail = fail
    for number, (prompt, params) in enumerate(requests):
        engine.add(f"r{number}", prompt, **params)
        if step_between:
            engine.step()
    engine.run()
    engine.assert_forgotten()
    return engine


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requests=st.lists(st.tuples(PROMPTS, OPTIONS, SAMPLING), min_size=1, max_size=6),
    max_drafts=st.sampled_from([1, 4, 9]),
    num_blocks=st.sampled_from([16, 30, 100]),
    budget=st.sampled_from([6, 15, 64]),
    memory=st.sampled_from([1, 2]),
)
def test_same_answers_with_the_real_sampler(make_engine, requests, max_drafts, num_blocks, budget, memory):
    """Greedy or sampled, with penalties, bans and ends, alone or beside others, through chunks, hits and preemption."""
    requests = [(prompt, {**options, **sampling}) for prompt, options, sampling in requests]
    limits = {"num_blocks": num_blocks, "max_num_batched_tokens": budget, "max_num_seqs": 6, "memory": memory}
    with_guesses, without = (
        serve(make_engine, requests, drafts, sampler=RecordingSampler(), **limits) for drafts in (max_drafts, 0)
    )
    assert answers(with_guesses) == answers(without)
    stats, plain = with_guesses.core.stats(), without.core.stats()
    assert stats.generation_tokens == plain.generation_tokens
    assert stats.prompt_tokens == plain.prompt_tokens
    assert plain.spec_drafted_tokens == 0
    assert stats.spec_accepted_tokens <= stats.spec_drafted_tokens


class RecordingSampler(Sampler):
    """The real one, with the name by which the engine fixture looks for what was left behind."""

    def __init__(self) -> None:
        super().__init__(97, (EOS,))

    @property
    def sequences(self):
        return self._sequences


def test_text_that_repeats_itself_takes_fewer_steps(make_engine):
    """All of this is for this; and steps must be fewer by exactly the accepted tokens of a lone stream."""
    requests = [(LOOP, {"max_tokens": 40, "ignore_eos": True})]
    with_guesses, without = (serve(make_engine, requests, drafts, num_blocks=64) for drafts in (7, 0))
    assert answers(with_guesses) == answers(without)
    stats, plain = with_guesses.core.stats(), without.core.stats()
    assert stats.spec_accepted_tokens > 10
    assert stats.steps == plain.steps - stats.spec_accepted_tokens


@pytest.mark.parametrize("seed", range(6))
def test_guesses_are_accepted_on_repetitive_text(make_engine, seed):
    """A drafter that proposes and never hits would pass every test of equality."""
    rng = random.Random(seed)
    text = [rng.randrange(50) for _ in range(rng.randint(12, 30))]

    def recite(tokens) -> int:
        """The text again and again, with a slip at every eleventh token."""
        return text[len(tokens) % len(text)] if len(tokens) % 11 else len(tokens) % 90

    engine = make_engine(max_drafts=5, num_blocks=100)
    engine.model.next_token = recite
    for start in (len(text), len(text) + 4):
        engine.add(f"r{start}", [recite(range(place)) for place in range(start)], max_tokens=60)
    engine.run()
    stats = engine.core.stats()
    assert stats.spec_accepted_tokens > 0.3 * stats.generation_tokens
    assert stats.spec_accepted_tokens > 0.4 * stats.spec_drafted_tokens


def test_each_continuation_guesses_for_itself(make_engine):
    """Forks share the prompt's blocks and nothing of what they have guessed."""
    requests = [(LOOP, {"max_tokens": 30, "n": 3, "ignore_eos": True})]
    with_guesses, without = (serve(make_engine, requests, drafts, num_blocks=100) for drafts in (5, 0))
    assert answers(with_guesses) == answers(without)
    assert with_guesses.core.stats().spec_accepted_tokens > 0


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_no_block_of_an_unverified_token_can_be_found(make_engine, block_size):
    """A block that holds a wrong guess, found by the next prompt, would put another text into its context."""
    engine = make_engine(max_drafts=7, block_size=block_size, num_blocks=128, max_model_len=100)
    engine.model.memory = 2
    engine.add("r", LOOP, max_tokens=60, ignore_eos=True)
    cache = engine.core.scheduler.kv.cache
    drafted = 0
    while engine.core.has_work:
        engine.step()
        drafted += sum(part.num_drafts for part in engine.plans[-1].scheduled)
        text = [*LOOP, *engine.tokens("r")]
        for block in cache._by_key.values():
            chain = []
            while block is not None:
                chain = [*block.token_ids, *chain]
                block = block.parent
            assert chain == text[: len(chain)]
            assert len(chain) < len(text), "the latest token has no KV yet"
    assert drafted > engine.core.stats().spec_accepted_tokens > 0


def test_after_a_step_no_block_is_held_for_wrong_guesses(make_engine):
    """Held, it would be missing when a neighbour grows, and preempt it."""
    engine = make_engine(max_drafts=7, block_size=2, num_blocks=200)
    engine.model.memory = 2
    for number in range(4):
        engine.add(f"r{number}", [*LOOP, number], max_tokens=40)
    while engine.core.has_work:
        engine.step()
        for seq in engine.core.scheduler._roster.running:
            assert len(seq.block_ids) == -(-seq.num_computed // 2)
    assert engine.core.stats().spec_drafted_tokens > engine.core.stats().spec_accepted_tokens


@pytest.mark.parametrize("num_blocks", [14, 16, 20])
def test_guesses_preempt_nobody(make_engine, num_blocks):
    """In a pool that is just large enough, an engine that guesses must not preempt more than one that does not."""
    requests = [((*LOOP, number), {"max_tokens": 20, "ignore_eos": True}) for number in range(3)]
    limits = {"num_blocks": num_blocks, "max_num_batched_tokens": 64, "step_between": False}
    with_guesses, without = (serve(make_engine, requests, drafts, **limits) for drafts in (7, 0))
    assert answers(with_guesses) == answers(without)
    assert with_guesses.core.stats().preemptions <= without.core.stats().preemptions


def test_guesses_take_nothing_from_prompts(make_engine):
    """A prompt that waits for its chunk must get the whole rest of the budget."""
    engine = make_engine(max_drafts=7, max_num_batched_tokens=16, num_blocks=64)
    engine.model.memory = 1
    engine.add("loop", LOOP, max_tokens=60, ignore_eos=True)
    while engine.core.stats().spec_accepted_tokens == 0:
        engine.step()
    engine.add("prompt", range(50, 66), max_tokens=2)
    engine.step()
    loop, prompt = engine.plans[-1].scheduled
    assert (len(loop.token_ids), len(prompt.token_ids)) == (1, 15)
    for _ in range(4):
        engine.step()
    assert any(plan.scheduled[0].num_drafts for plan in engine.plans[-4:])


@pytest.mark.parametrize("fails", [(4,), (4, 5, 9), (3, 8, 13, 18), range(2, 60, 4)])
def test_a_failed_step_is_undone_with_its_guesses(make_engine, fails):
    """Suspects run without guesses; nothing of the failed step's guesses may stay in tokens, blocks or samplers."""
    requests = [((*LOOP, number), {"max_tokens": 30, "temperature": 1.5, "seed": number}) for number in range(3)]
    limits = {"num_blocks": 100, "step_between": False, "max_num_batched_tokens": 64}
    failing = serve(make_engine, requests, 7, fails=fails, sampler=RecordingSampler(), **limits)
    healthy = serve(make_engine, requests, 0, sampler=RecordingSampler(), **limits)
    assert answers(failing) == answers(healthy)
    assert failing.core.stats().spec_drafted_tokens > 0


def test_logits_that_break_in_a_run_of_guesses_end_the_text_where_they_would_without(make_engine):
    """The tokens before it were right and are reported; the blocks are not found again."""

    def run(max_drafts):
        engine = make_engine(max_drafts=max_drafts, num_blocks=64)
        engine.model.memory = 1
        sample = engine.sampler.sample
        given: dict[int, int] = {}

        def sample_or_break(logits: np.ndarray, seq_keys, maxima=None):
            if broken := {key: "NaN" for key in seq_keys if given.get(key) == 22}:
                raise BrokenLogits(broken)
            result = sample(logits, seq_keys)
            for key in seq_keys:
                given[key] = given.get(key, 0) + 1
            return result

        engine.sampler.sample = sample_or_break
        engine.add("r", LOOP, max_tokens=40, ignore_eos=True, logprobs=0)
        engine.add("s", (*LOOP, 5), max_tokens=40, ignore_eos=True, logprobs=0)
        engine.run()
        engine.assert_forgotten()
        return engine

    with_guesses, without = run(7), run(0)
    assert answers(with_guesses) == answers(without)
    for request_id in "rs":
        finish = with_guesses.finish(request_id)
        assert (finish.reason, finish.error_code, finish.message) == (
            FinishReason.ERROR,
            ErrorCode.ENGINE_FAILED,
            "NaN",
        )
        assert len(with_guesses.tokens(request_id)) == 22
    assert with_guesses.core.stats().generation_tokens == without.core.stats().generation_tokens == 44
    assert with_guesses.core.stats().spec_accepted_tokens > 0


def test_a_sampler_that_fails_on_a_guess_loses_no_token(make_engine):
    """Half of the step is recorded by then and cannot be undone: what has been sampled stands."""
    engine = make_engine(max_drafts=7, num_blocks=64)
    engine.model.memory = 1
    sample, calls, failed = engine.sampler.sample, 0, 0

    def sample_or_fail(logits: np.ndarray, seq_keys, maxima=None):
        nonlocal calls, failed
        calls += 1
        first_of_step = len(engine.executor.num_tokens) > sample_or_fail.steps
        sample_or_fail.steps = len(engine.executor.num_tokens)
        if not first_of_step and calls % 4 == 0:
            failed += 1
            raise MemoryError
        return sample(logits, seq_keys)

    sample_or_fail.steps = 0
    engine.sampler.sample = sample_or_fail
    engine.add("r", LOOP, max_tokens=40, ignore_eos=True)
    engine.run()
    assert failed > 2
    assert engine.tokens("r") == engine.expected("r", 40)
    engine.assert_forgotten()


def test_a_lone_step_that_fails_with_guesses_is_tried_without(make_engine):
    """A text must not end because of tokens that are not its own."""
    engine = make_engine(max_drafts=7, num_blocks=64)
    engine.model.memory = 1

    def fail(step) -> None:
        if len(step.kv_lens) == 1 and len(step.input_ids) == 8:
            raise EngineError("no room for eight rows")

    engine.executor.fail = fail
    engine.add("r", LOOP, max_tokens=40, ignore_eos=True)
    engine.run()
    assert engine.tokens("r") == engine.expected("r", 40)
    counts = [len(plan.scheduled[0].token_ids) for plan in engine.plans]
    assert 8 in counts
    assert all(following == 1 for count, following in pairwise(counts) if count == 8)


@pytest.mark.parametrize("steps_before", range(2, 14))
def test_abort_between_steps_with_guesses(make_engine, steps_before):
    """C46: the blocks are free at once; neighbours keep their tokens."""
    engine = make_engine(max_drafts=7, block_size=2, num_blocks=128)
    engine.model.memory = 1
    engine.add("other", (*LOOP, 9), max_tokens=50, ignore_eos=True)
    engine.add("r", LOOP, max_tokens=50, n=2, ignore_eos=True)
    for _ in range(steps_before):
        engine.step()
    engine.core.abort("r")
    engine.run()
    assert engine.tokens("other") == engine.expected("other", 50)
    engine.assert_forgotten()


def test_endings_in_a_run_of_right_guesses(make_engine):
    """EOS and stop tokens that come in the middle of a loop: nothing after them, and the same reason."""
    requests = [
        (LOOP, {"max_tokens": 40}),
        (LOOP, {"max_tokens": 40, "stop_token_ids": (2,)}),
        (LOOP, {"max_tokens": 40, "stop_token_ids": (0, 2), "min_tokens": 6}),
        ((*LOOP, 2), {"max_tokens": 13, "ignore_eos": True}),
        ((*LOOP, 1), {"max_tokens": None, "ignore_eos": True}),
    ]
    with_guesses, without = (serve(make_engine, requests, drafts, num_blocks=100) for drafts in (7, 0))
    assert answers(with_guesses) == answers(without)
    reasons = [with_guesses.finish(f"r{number}").reason for number in range(5)]
    assert reasons == [
        FinishReason.STOP,
        FinishReason.STOP,
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
    ]
    assert with_guesses.core.stats().spec_accepted_tokens > 0
