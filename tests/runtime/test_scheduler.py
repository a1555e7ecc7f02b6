"""What runs when: chunks, endings, preemption, sharing, forks. Tokens are always those of the unbatched reference."""

import gc
import sys

import pytest

from castline.runtime.events import FinishReason

EOS = 96  # of the scripted engine


def test_a_prompt_over_the_budget_is_chunked(make_engine):
    """C06: a default token budget must bound a step, never reject or truncate a prompt."""
    engine = make_engine(max_num_batched_tokens=8)
    engine.add("long", range(50), max_tokens=6)
    engine.run()
    assert engine.tokens("long") == engine.expected("long", 6)
    assert engine.executor.num_tokens[:7] == [8, 8, 8, 8, 8, 8, 2]


def test_a_prompt_one_short_of_the_model_gives_one_token(make_engine):
    """C07: off by one here either wastes the last position or writes past it."""
    engine = make_engine(max_model_len=64)
    engine.add("a", range(63))
    engine.add("b", range(62), max_tokens=10)
    engine.run()
    for request_id, count in (("a", 1), ("b", 2)):
        assert engine.finish(request_id).reason is FinishReason.LENGTH
        assert engine.tokens(request_id) == engine.expected(request_id, count)


def test_without_max_tokens_the_text_ends_at_the_models_length(make_engine):
    """C26: no endless generation, and no silent shift of the context."""
    engine = make_engine(max_model_len=40)
    engine.add("a", range(10))
    engine.run()
    assert engine.finish("a").reason is FinishReason.LENGTH
    assert engine.tokens("a") == engine.expected("a", 30)


def test_a_request_that_can_never_fit_ends_at_once_and_the_next_one_completes(make_engine):
    """C12: it must neither block the line nor stop the engine, even where the edge let it through."""
    engine = make_engine(num_blocks=8, block_size=16, max_model_len=1024)
    engine.add("huge", range(200), max_tokens=4)
    engine.add("small", range(9), max_tokens=4)
    engine.run()
    assert engine.finish("huge").reason is FinishReason.ERROR
    assert "needs 13 KV blocks" in engine.finish("huge").message
    assert engine.tokens("small") == engine.expected("small", 4)
    engine.assert_forgotten()


def test_three_growing_sequences_in_a_pool_for_two(make_engine):
    """C13: no livelock, no lost or changed token, the latest arrival is the victim, and the counter is exact."""
    engine = make_engine(num_blocks=12, block_size=4, max_model_len=24, max_num_batched_tokens=16)
    for number in range(3):
        engine.add(f"r{number}", range(10 * number, 10 * number + 4), max_tokens=20)
    preempted = []
    while engine.core.has_work:
        engine.step()
        assert engine.plans[-1].num_tokens >= 1
        preempted += engine.plans[-1].preempted
        for seq_id in engine.plans[-1].preempted:
            lane = engine.core.scheduler.get(seq_id).lane
            assert engine.core.scheduler._waiting[lane].first(1)[0].seq_id == seq_id, "not at the head of its lane"
    assert preempted, "the pool was to be too small"
    assert set(preempted) == {2}
    assert engine.core.stats().preemptions == len(preempted)
    for number in range(3):
        assert engine.tokens(f"r{number}") == engine.expected(f"r{number}", 20)


def test_the_victim_goes_before_those_that_wait(make_engine):
    """C13: a victim sent to the tail would pay for its preemption with the whole queue again."""
    engine = make_engine(num_blocks=12, block_size=4, max_model_len=24, max_num_seqs=3)
    for number in range(4):
        engine.add(f"r{number}", range(10 * number, 10 * number + 4), max_tokens=20)
    engine.run()
    assert engine.core.stats().preemptions > 0
    ends = [event.request_id for event in engine.events if event.finish]
    assert ends == ["r0", "r1", "r2", "r3"]


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


@pytest.mark.parametrize(
    ("params", "count", "reason", "stop_token"),
    [
        ({}, 3, FinishReason.STOP, EOS),
        ({"ignore_eos": True}, 9, FinishReason.LENGTH, None),
        ({"ignore_eos": True, "stop_token_ids": (77,)}, 5, FinishReason.STOP, 77),
        ({"stop_token_ids": (77,), "min_tokens": 4}, 5, FinishReason.STOP, 77),
        ({"min_tokens": 3}, 3, FinishReason.STOP, EOS),
        ({"max_tokens": 3}, 3, FinishReason.STOP, EOS),
        ({"max_tokens": 2}, 2, FinishReason.LENGTH, None),
    ],
)
def test_endings(make_engine, params, count, reason, stop_token):
    """EOS as the third token, 77 as the fifth; the ending token is reported, and wins over the length."""
    engine = make_engine()
    engine.model.scripted = {10 + 2: EOS, 10 + 4: 77}
    engine.add("r", range(10), **{"max_tokens": 9, **params})
    engine.run()
    finish = engine.finish("r")
    assert len(engine.tokens("r")) == count
    assert (finish.reason, finish.stop_token_id) == (reason, stop_token)


def test_several_tokens_a_step(make_engine):
    """Accepted draft tokens: what follows an ending token is dropped, and only what was accepted counts as computed."""
    engine = make_engine()
    scheduler = engine.core.scheduler
    engine.add("r", range(10), max_tokens=9, stop_token_ids=(7,))
    seq_id = scheduler.schedule().scheduled[0].seq_id
    seq = scheduler.get(seq_id)
    scheduler.commit(engine.plans[-1], {seq_id: (1,)})
    assert (seq.num_computed, seq.num_tokens) == (10, 11)
    plan = scheduler.schedule()
    (progress,) = scheduler.commit(plan, {seq_id: (2, 3, 7, 4)})
    assert progress.token_ids == (2, 3, 7)
    assert progress.finish.stop_token_id == 7
    assert not scheduler.has_work


def test_ten_thousand_requests_leave_nothing(make_engine):
    """C18: state kept for each request that ever was grows until the server is killed."""
    engine = make_engine(max_num_seqs=4)
    options = {"stop": ("x",), "stop_token_ids": (50, 51), "deadline": 1e9, "logprobs": 1}

    def serve(begin: int, end: int) -> int:
        """Live objects of the interpreter after requests *begin* to *end*, every fourth of them aborted."""
        for number in range(begin, end):
            prompt = (number % 90, number // 90 % 90, 3, 4, 5)
            engine.add(f"r{number}", prompt, max_tokens=2, cache_salt=f"s{number}", **options)
            if number % 4 == 3:
                engine.core.abort(f"r{number}")
                while engine.core.has_work:
                    engine.core.step()
                for record in (engine.plans, engine.requests, engine.executor.num_tokens):
                    record.clear()
        gc.collect()
        return sys.getallocatedblocks()

    warm = serve(0, 2_000)
    grown = serve(2_000, 10_000) - warm
    engine.assert_forgotten()
    assert grown < 800, f"{grown} objects are left of 8,000 requests"
