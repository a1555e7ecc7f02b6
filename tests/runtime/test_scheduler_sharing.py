"""Blocks that several sequences share: prefix hits, prefixes being computed, the n continuations of a request."""

import tracemalloc

import pytest

from castline.runtime.events import FinishReason
from castline.runtime.kv_manager import KvManager


def test_colliding_hashes_change_no_token(make_engine):
    """The whole engine with a hash that nearly always collides: fewer hits, the same text."""
    engine = make_engine(num_blocks=24, max_model_len=64, max_num_batched_tokens=12)
    scheduler = engine.core.scheduler
    scheduler.kv = scheduler._filler._kv = KvManager(24, 4, hash_fn=lambda value: hash(value) % 3)
    for number in range(40):
        engine.add(f"r{number}", [number % 2, number % 3, *range(number % 17)], max_tokens=9, n=1 + number % 2)
        engine.step()
    engine.run()
    for number in range(40):
        for index in range(1 + number % 2):
            assert engine.tokens(f"r{number}", index) == engine.expected(f"r{number}", 9, index)
    assert engine.core.stats().preemptions > 0
    engine.assert_forgotten()


@pytest.mark.parametrize("prompt_len", [11, 12, 13])
def test_the_same_prompt_again_and_again(make_engine, prompt_len):
    """C14: a hit must leave the last token to compute, also where the prompt ends at a block border."""
    engine = make_engine(block_size=4)
    for number in range(200):
        engine.add(f"r{number}", range(prompt_len), max_tokens=3)
        engine.run()
        assert engine.tokens(f"r{number}") == engine.expected(f"r{number}", 3)
        cached = 0 if number == 0 else (prompt_len - 1) // 4 * 4
        assert engine.first_event(f"r{number}").cached_tokens == cached
    stats = engine.core.stats()
    assert stats.prefix_cache_queries == 200 * prompt_len
    assert stats.prefix_cache_hits == 199 * ((prompt_len - 1) // 4 * 4)


def test_generated_tokens_are_found_by_the_next_turn(make_engine):
    """A chat sends its own answers back: their blocks are as good as a prompt's."""
    engine = make_engine(block_size=4)
    engine.add("turn1", range(8), max_tokens=9)
    engine.run()
    engine.add("turn2", [*range(8), *engine.tokens("turn1"), 1, 2, 3], max_tokens=4)
    engine.run()
    assert engine.first_event("turn2").cached_tokens == 16
    assert engine.tokens("turn2") == engine.expected("turn2", 4)


def test_requests_that_arrive_together_share_their_prefix(make_engine):
    """The first computes it, the others wait for its blocks; prompts of another kind do not wait with them."""
    engine = make_engine(max_num_batched_tokens=64, block_size=4)
    prefix = list(range(40))
    for number in range(4):
        engine.add(f"r{number}", [*prefix, 50 + number], max_tokens=3)
    engine.add("other", range(60, 70), max_tokens=3)
    engine.step()
    assert engine.executor.num_tokens == [41 + 10]
    engine.run()
    assert engine.executor.num_tokens[1] == 2 + 3 * 1
    for request_id in ("r0", "r1", "r2", "r3", "other"):
        assert engine.tokens(request_id) == engine.expected(request_id, 3)
    assert [engine.first_event(f"r{n}").cached_tokens for n in range(4)] == [0, 40, 40, 40]


@pytest.mark.parametrize("max_drafts", [0, 4])
def test_thirty_two_requests_with_a_thousand_tokens_in_common_compute_them_once(make_engine, max_drafts):
    """They arrive together, so none of it is cached when they do; computed by each, it would be 32 times the work."""
    limits = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 512, "num_blocks": 512}
    engine = make_engine(**limits, block_size=32, max_drafts=max_drafts)
    prefix, rest, output = [number % 90 for number in range(1000)], 20, 4
    for number in range(32):
        engine.add(f"r{number}", [*prefix, number, *range(rest - 1)], max_tokens=output)
    engine.run()
    shared = 1000 // 32 * 32
    guessed = engine.core.stats().spec_drafted_tokens - engine.core.stats().spec_accepted_tokens
    prompts = sum(engine.executor.num_tokens) - 32 * (output - 1) - guessed
    assert prompts == 1000 + rest + 31 * (1000 + rest - shared)
    assert [engine.first_event(f"r{number}").cached_tokens for number in range(32)] == [0] + [shared] * 31
    for number in (0, 1, 31):
        assert engine.tokens(f"r{number}") == engine.expected(f"r{number}", output)


def test_who_waits_for_a_prefix_takes_over_when_its_owner_is_aborted(make_engine):
    """Waiting for a sequence that has left would be for ever."""
    engine = make_engine(max_num_batched_tokens=8, block_size=4)
    engine.add("owner", range(40), max_tokens=3)
    engine.add("waiter", range(41), max_tokens=3)
    engine.step()
    assert engine.core.stats().num_running == 1
    engine.core.abort("owner")
    engine.run()
    assert engine.first_event("waiter").cached_tokens == 8
    assert engine.tokens("waiter") == engine.expected("waiter", 3)


def test_a_salt_keeps_requests_apart(make_engine):
    """Neither the blocks of another salt nor blocks being computed under it may be waited for or read."""
    engine = make_engine(max_num_batched_tokens=64)
    for number, salt in enumerate(("a", "b", None, "a")):
        engine.add(f"r{number}", range(20), max_tokens=2, cache_salt=salt)
    engine.run()
    assert [engine.first_event(f"r{n}").cached_tokens for n in range(4)] == [0, 0, 0, 16]


@pytest.mark.parametrize("prompt_len", [1, 4, 5, 6, 8, 33])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_n_continuations_share_the_prompt(make_engine, prompt_len, max_num_seqs):
    """Each must see the prompt's KV and only its own tokens after it; the prompt is computed once."""
    engine = make_engine(max_num_seqs=max_num_seqs, block_size=4, max_num_batched_tokens=16)
    engine.add("r", range(prompt_len), n=4, max_tokens=7)
    engine.run()
    for index in range(4):
        assert engine.tokens("r", index) == engine.expected("r", 7, index)
        assert engine.finish("r", index).reason is FinishReason.LENGTH
    recomputed = 1 if max_num_seqs == 8 else 4
    assert sum(engine.executor.num_tokens) <= prompt_len + 4 * 6 + 3 * recomputed
    assert engine.core.stats().prompt_tokens == prompt_len
    engine.assert_forgotten()


def test_forks_copy_the_partial_block_only(make_engine):
    """Copying full blocks, or computing them again, would cost n times the prompt."""
    engine = make_engine(block_size=4, max_num_batched_tokens=64)
    engine.add("r", range(34), n=3, max_tokens=5)
    engine.step()
    assert engine.core.stats().kv_blocks_used == 9
    engine.step()
    assert engine.core.stats().kv_blocks_used == 9 + 2
    assert len(engine.executor.copied) == 2


def test_the_next_continuation_computes_the_prompt_when_the_first_is_aborted(make_engine):
    """The others wait for the first one's prompt: they must not wait for a sequence that is gone."""
    engine = make_engine(max_num_batched_tokens=8)
    engine.add("r", range(30), n=3, max_tokens=4)
    engine.step()
    engine.core.abort("r", 0)
    engine.run()
    assert engine.finish("r", 0).reason is FinishReason.ABORT
    for index in (1, 2):
        assert engine.tokens("r", index) == engine.expected("r", 4, index)


def test_continuations_survive_preemption(make_engine):
    """A fork whose source has lost its blocks must start over from the prefix cache."""
    engine = make_engine(num_blocks=9, block_size=4, max_model_len=33, max_num_batched_tokens=16)
    engine.add("r", range(10), n=3, max_tokens=20)
    engine.run()
    assert engine.core.stats().preemptions > 0
    for index in range(3):
        assert engine.tokens("r", index) == engine.expected("r", 20, index)


def test_continuations_that_wait_share_the_prompt(make_engine):
    """A body of megabytes may ask for 128 texts of each of its prompts: a copy for each filled the memory."""
    engine = make_engine(max_model_len=4000, num_blocks=1100, max_num_batched_tokens=4000, max_num_seqs=3)
    prompt = [number % 96 for number in range(3000)]
    tracemalloc.start()
    try:
        engine.add("r", prompt, max_tokens=2, n=128)
        added = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert added < 128 * 8 * len(prompt) / 5
    for _ in range(3):
        engine.step()
    for index in range(3):
        assert engine.tokens("r", index) == engine.expected("r", 2, index)
    engine.core.abort("r")
    engine.run()
    engine.assert_forgotten()
