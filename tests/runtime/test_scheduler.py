"""What runs when: chunks, endings, preemption. Tokens are always those of the unbatched reference."""

import gc
import subprocess
import sys

import pytest
from msgspec import structs

from castline.runtime.events import FinishReason
from castline.runtime.plan import ScheduledSequence

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
    num_behind = []
    while engine.core.has_work:
        engine.step()
        for seq_id in engine.plans[-1].preempted:
            scheduler = engine.core.scheduler
            line = scheduler._roster.waiting.first(scheduler.get(seq_id).lane)
            assert line[0].seq_id == seq_id
            num_behind.append(len(line) - 1)
    assert num_behind[0] == 1
    assert [event.request_id for event in engine.events if event.finish] == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize(
    ("limits", "shared", "most"),
    [
        ({"max_num_seqs": 4}, False, 0),  # no place is free
        ({"max_num_seqs": 8, "num_blocks": 20}, False, 2),  # the heads of line find no room
        ({"max_num_seqs": 8, "num_blocks": 64}, True, 8),  # they wait for what a running one computes
    ],
)
def test_a_step_costs_the_same_whoever_waits(make_engine, limits, shared, most):
    """64 or 256 that wait: a step must look at a bounded number of them, or throughput falls with the queue."""

    def looked_up(num_requests: int) -> list[int]:
        engine = make_engine(max_num_batched_tokens=16, block_size=4, max_model_len=48, **limits)
        kv, counts = engine.core.scheduler.kv, []
        lookup = kv.lookup
        kv.lookup = lambda seq: counts.append(seq.seq_id) or lookup(seq)
        for number in range(num_requests):
            engine.add(f"r{number}", [*range(14)] if shared else [number % 90, *range(13)], max_tokens=34)
        per_step = []
        for _ in range(20):
            before = len(counts)
            admitted = engine.core.stats().num_waiting
            engine.step()
            admitted -= engine.core.stats().num_waiting
            per_step.append(len(counts) - before - admitted)
        return per_step

    few, many = looked_up(64), looked_up(256)
    assert few == many
    assert max(many) <= most


def test_admission_counts_what_running_prompts_still_need(make_engine):
    """Two chunked prompts that do not fit together, both admitted for their first chunks, would thrash."""
    engine = make_engine(num_blocks=20, block_size=4, max_num_batched_tokens=8)
    engine.add("a", range(40), max_tokens=4)
    engine.add("b", range(50, 86), max_tokens=4)
    engine.run()
    assert engine.core.stats().preemptions == 0
    for request_id in "ab":
        assert engine.tokens(request_id) == engine.expected(request_id, 4)


def test_admission_leaves_a_margin_for_the_running(make_engine):
    """A prompt that takes the last free block is preempted as soon as a running sequence grows."""
    engine = make_engine(num_blocks=8, block_size=4, max_model_len=32)
    engine.add("a", range(11), max_tokens=8)
    engine.step()
    engine.add("b", range(50, 70), max_tokens=2)
    engine.run()
    assert engine.core.stats().preemptions == 0


def test_only_younger_sequences_outside_the_step_are_preempted(make_engine):
    """Preempting an older one would let two sequences take turns for ever; one in the plan would run without blocks."""
    engine = make_engine(num_blocks=14, block_size=4, max_num_batched_tokens=16)
    scheduler = engine.core.scheduler
    for number in range(4):
        engine.add(f"r{number}", [number, *range(7)], max_tokens=10)
    engine.step()
    engine.step()
    oldest, second, third, youngest = scheduler._roster.running
    scheduler._filler.start()
    assert scheduler._filler._victim(second) is youngest
    assert scheduler._filler._victim(youngest) is None
    scheduler._filler.parts.append(ScheduledSequence(youngest.seq_id, (1,), 8, (0,), samples=True))
    assert scheduler._filler._victim(oldest) is third
    scheduler._filler.parts.append(ScheduledSequence(third.seq_id, (1,), 8, (0,), samples=True))
    assert scheduler._filler._victim(second) is None


def test_a_sequence_with_room_misses_nothing(make_engine):
    """The short way past the reservation: a shared block taken for its own would be written under its neighbours."""
    engine = make_engine(block_size=4)
    engine.add("a", range(6), max_tokens=9, n=3)
    engine.add("b", range(8), max_tokens=9)
    seen = set()
    while engine.core.has_work:
        kv = engine.core.scheduler.kv
        for seq in engine.core.scheduler._roster.running:
            assert kv.has_room(seq) == (kv.missing(seq, 1) == 0)
            seen.add(kv.has_room(seq))
        engine.step()
    assert seen == {True, False}


def test_a_failed_step_gives_its_blocks_back(make_engine):
    """Blocks reserved for tokens that were not computed would shrink the pool with every failure."""
    engine = make_engine(max_num_batched_tokens=16, block_size=4)
    engine.add("a", range(8), max_tokens=9, n=2)
    engine.add("b", range(50, 80), max_tokens=9)
    engine.step()
    used = engine.core.stats().kv_blocks_used
    scheduler = engine.core.scheduler
    plan = scheduler.schedule()
    assert plan.block_copies
    assert engine.core.stats().kv_blocks_used > used
    scheduler.rollback(plan)
    assert engine.core.stats().kv_blocks_used == used
    engine.run()
    assert engine.tokens("b") == engine.expected("b", 9)


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


@pytest.mark.parametrize("ending", [70, 71, 72])
def test_any_of_several_eos_ids_ends(make_engine, ending):
    """C25: a model with three EOS ids must not run on past two of them; ignore_eos disables all three."""
    engine = make_engine(eos_token_ids=(70, 71, 72))
    engine.model.scripted = {10 + 2: ending}
    engine.add("ends", range(10), max_tokens=9)
    engine.add("ignores", range(10), max_tokens=9, ignore_eos=True)
    engine.run()
    finish = engine.finish("ends")
    assert (len(engine.tokens("ends")), finish.reason, finish.stop_token_id) == (3, FinishReason.STOP, ending)
    assert (len(engine.tokens("ignores")), engine.finish("ignores").reason) == (9, FinishReason.LENGTH)


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
    drafts = structs.replace(plan.scheduled[0], token_ids=(1, 2, 3, 50))
    scheduler.commit(structs.replace(plan, scheduled=(drafts,)), {seq_id: (2, 3)})
    assert (seq.num_computed, seq.num_tokens) == (12, 13), "the KV of the rejected drafts is not this sequence's"
    plan = scheduler.schedule()
    assert (plan.scheduled[0].start, plan.scheduled[0].token_ids) == (12, (3,))
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


def test_no_array_and_no_inference_library_is_imported():
    """Scheduling is plain Python, so that it can be tested in microseconds and never waits for a device's library."""
    heavy = "{'numpy', 'onnxruntime', 'torch', 'tensorrt'}"
    code = f"import sys, castline.runtime.scheduler; print(*{heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
