"""Steps planned from the one before them are those that would have been planned anew."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castline.engines.errors import EngineError
from castline.runtime.decodes import Decodes
from castline.runtime.one_token import OneToken
from castline.runtime.plan import ScheduledSequence


def beside_another(make_engine, **limits):
    """An engine, and one whose every step is planned anew."""
    engine, anew = make_engine(**limits), make_engine(**limits)
    anew.core.scheduler._new_cohort = lambda parts: None
    return engine, anew


def num_from_the_last(engine) -> int:
    """Steps that a cohort planned."""
    scheduled = [plan.scheduled for plan in engine.plans]
    return sum(
        isinstance(now, Decodes) and isinstance(before, Decodes) and now.seq_ids is before.seq_ids
        for before, now in pairwise(scheduled)
    )


def fail(step) -> None:
    raise EngineError("scripted")


@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": 20, "max_num_seqs": 7},
        {"num_blocks": 64, "max_num_seqs": 7},
        {"num_blocks": 64, "max_num_seqs": 3},
        {"num_blocks": 65, "max_num_seqs": 4, "block_size": 1, "max_model_len": 64},
    ],
    ids=["few blocks", "blocks for all", "three sequences", "blocks of one token"],
)
@pytest.mark.parametrize("seed", range(4))
def test_the_plans_are_the_same(make_engine, seed, limits, max_drafts):
    """Prevents a cohort that outlives an arrival, an abort, an end, a failed step a preemption or a block."""
    rng = random.Random(seed)
    engines = beside_another(make_engine, max_drafts=max_drafts, **limits)
    for engine in engines:
        engine.model.memory = 2 if max_drafts else None
    names: list[str] = []
    for turn in range(250):
        if rng.random() < 0.12 or turn < 6:
            names.append(f"r{turn}")
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
            params = {"n": rng.choice((1, 1, 3)), "max_tokens": rng.randrange(1, 40), "ignore_eos": rng.random() < 0.5}
            params |= {"stop_token_ids": rng.choice(((), (3,))), "min_tokens": rng.choice((0, 1))}
            for engine in engines:
                engine.add(names[-1], prompt, **params)
        if rng.random() < 0.02:
            name = rng.choice(names)
            for engine in engines:
                engine.core.abort(name)
        fails = rng.random() < 0.02
        for engine in engines:
            engine.executor.fail = fail if fails else None
            if engine.core.has_work:
                engine.step()
        planned, anew = ([list(plan.scheduled) for plan in engine.plans] for engine in engines)
        assert planned == anew
        assert engines[0].events == engines[1].events
    for engine in engines:
        engine.executor.fail = None
        engine.run()
        engine.assert_forgotten()
    assert engines[0].events == engines[1].events
    assert num_from_the_last(engines[0]) > (0 if max_drafts else 8)
    assert num_from_the_last(engines[1]) == 0


def test_a_long_run_is_planned_once(make_engine):
    """Prevents a fast path that nothing takes: five sequences decode a hundred tokens over many blocks."""
    engine, anew = beside_another(make_engine, num_blocks=160)
    for side in (engine, anew):
        for i in range(5):
            side.add(str(i), [i] * (i + 1), max_tokens=100, ignore_eos=True)
        side.run()
    assert engine.events == anew.events
    assert num_from_the_last(engine) >= 95
    assert all(engine.tokens(str(i)) == engine.expected(str(i), 100) for i in range(5))


def test_those_who_wait_change_nothing_while_all_places_are_taken(make_engine):
    """Prevents a saturated server that plans every step anew, or one that admits nobody when a place is free again."""
    engine, anew = beside_another(make_engine, num_blocks=160, max_num_seqs=5)
    for side in (engine, anew):
        for i in range(12):
            side.add(str(i), [i] * (i + 1), max_tokens=50 + i, ignore_eos=True)
            side.step()
        side.run()
    assert engine.events == anew.events
    assert [list(plan.scheduled) for plan in engine.plans] == [list(plan.scheduled) for plan in anew.plans]
    assert num_from_the_last(engine) > len(engine.plans) / 2


def test_short_blocks_are_the_schedulers_affair(make_engine):
    """Prevents a cohort that takes blocks which are not there, or that preempts nobody and waits for ever."""
    engine, anew = beside_another(make_engine, num_blocks=12, max_model_len=48)
    for side in (engine, anew):
        for i in range(4):
            side.add(str(i), [i] * 5, max_tokens=30, ignore_eos=True)
        side.run()
    assert engine.events == anew.events
    assert engine.core.scheduler.counters.preemptions == anew.core.scheduler.counters.preemptions > 0


PARTS = st.builds(
    ScheduledSequence,
    seq_id=st.integers(0, 99),
    token_ids=st.tuples(st.integers(0, 9)),
    start=st.integers(0, 11),
    block_ids=st.just((5, 3, 8)),
    samples=st.just(True),
)


@settings(max_examples=50)
@given(st.lists(PARTS, max_size=5))
def test_columns_hold_what_the_parts_do(parts):
    """Prevents a column that is another's."""
    decodes = Decodes.of(parts, 4)
    assert list(decodes) == parts
    assert [decodes[place] for place in range(len(decodes))] == decodes[:] == parts
    assert decodes.slots == [part.block_ids[part.start // 4] * 4 + part.start % 4 for part in parts]
    assert Decodes.of(decodes, 4) is decodes


@pytest.mark.parametrize("change", [{"token_ids": (1, 2)}, {"samples": False}, {"all_logits": True}])
def test_what_is_no_decode_has_no_columns(change):
    """Prevents a prompt's part that is packed as one token."""
    plain = {"seq_id": 0, "token_ids": (1,), "start": 0, "block_ids": (0,), "samples": True}
    assert Decodes.of([ScheduledSequence(**plain), ScheduledSequence(**{**plain, **change})], 4) is None


def test_one_token_is_a_mapping_to_tuples():
    """Prevents an answer for a sequence that got no token."""
    sampled = OneToken((7, 3), [70, 30])
    assert dict(sampled) == {7: (70,), 3: (30,)}
    assert sampled.get(4, ()) == ()
    assert list(sampled) == [7, 3]
    assert len(sampled) == 2


def test_parts_in_another_order_are_no_cohort(make_engine):
    """Prevents the order of a step that took back a preempted sequence, which comes last in it, from staying."""
    engine = make_engine()
    for i in range(3):
        engine.add(str(i), [i] * 5, max_tokens=20, ignore_eos=True)
    engine.step()
    engine.step()
    scheduler, parts = engine.core.scheduler, list(engine.plans[-1].scheduled)
    assert scheduler._new_cohort(parts) is not None
    assert scheduler._new_cohort(parts[::-1]) is None
