"""Long prompts beside short ones: neither starves, in budget, in places or in blocks."""

from castline.runtime.lanes import Lane, LanePolicy


def lane_of(engine, request_id: str) -> Lane:
    return engine.core.scheduler.groups[request_id].members[0].lane


def tokens_in(plan, seq_id: int) -> int:
    return sum(len(part.token_ids) for part in plan.scheduled if part.seq_id == seq_id)


def first_token_step(engine, request_id: str, max_steps: int = 1000) -> int:
    """Steps from now to the first token."""
    for step in range(1, max_steps):
        if any(event.request_id == request_id and event.token_ids for event in engine.step()):
            return step
    raise AssertionError(f"{request_id} is starved")


def test_the_threshold_counts_what_is_not_cached(make_engine):
    """A long chat whose past is in the cache must not queue behind a long document."""
    engine = make_engine(max_num_batched_tokens=32)
    engine.add("long", range(40), max_tokens=1)
    engine.add("short", range(50, 82), max_tokens=1)
    assert (lane_of(engine, "long"), lane_of(engine, "short")) == (Lane.LONG, Lane.SHORT)
    engine.run()
    engine.add("next turn", range(50), max_tokens=1)
    assert lane_of(engine, "next turn") is Lane.SHORT


def test_a_long_prompt_alone_takes_the_whole_budget(make_engine):
    """Bounding a long prompt where nobody else waits would only make it slower."""
    engine = make_engine(max_num_batched_tokens=32)
    engine.add("long", range(90), max_tokens=2)
    engine.run()
    assert engine.executor.num_tokens == [32, 32, 26, 1]


def test_a_long_prompt_beside_streams_is_bounded(make_engine):
    """A step as long as the whole budget allows would stall every running stream for its duration."""
    engine = make_engine(max_num_batched_tokens=32, policy=LanePolicy(long_share=0.25))
    engine.add("stream", range(4), max_tokens=60)
    engine.step()
    engine.add("long", range(10, 90), max_tokens=2)
    for _ in range(10):
        engine.step()
        assert [len(part.token_ids) for part in engine.plans[-1].scheduled] == [1, 8]
    assert engine.tokens("long") == engine.expected("long", 1)
    assert len(engine.tokens("stream")) == 11, "the stream missed a step"


def test_short_prompts_pass_a_long_one(make_engine):
    """A short question must not wait until the document before it has been computed."""
    engine = make_engine(max_num_batched_tokens=32)
    engine.add("long", range(96), max_tokens=2)
    engine.step()
    engine.add("short", range(40, 60), max_tokens=2)
    assert first_token_step(engine, "short") == 1


def test_a_long_prompt_advances_under_a_flood_of_short_ones(make_engine):
    """Strict preference for short prompts would starve the long one for ever."""
    engine = make_engine(max_num_batched_tokens=32, max_num_seqs=4, policy=LanePolicy(long_share=0.25))
    engine.add("long", range(80), max_tokens=2)
    for number in range(60):
        engine.add(f"s{number}", [number, *range(20)], max_tokens=2)
    step = first_token_step(engine, "long")
    assert step == 80 // 8, "the long lane did not get its share"
    assert any(event.request_id.startswith("s") for event in engine.events), "nor the short lane its own"


def test_a_long_prompt_gets_a_place_under_a_flood_of_short_ones(make_engine):
    """With every place taken again at once by a short request, a long one would never be admitted."""
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=32)
    for number in range(2):
        engine.add(f"s{number}", [number, 1, 2], max_tokens=6)
    engine.step()
    engine.add("long", range(80), max_tokens=2)
    for number in range(2, 40):
        engine.add(f"s{number}", [number, 1, 2], max_tokens=6)
    first_token_step(engine, "long", max_steps=40)
    assert sum(event.finish is not None for event in engine.events) < 30


def test_short_prompts_get_a_place_under_a_flood_of_long_ones(make_engine):
    """The other way round: the long lane is served first, so it must not take every place that falls free."""
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=8)
    engine.add("l0", range(20), max_tokens=12)
    engine.add("l1", range(30, 50), max_tokens=60)
    first_token_step(engine, "l1")  # both decode now, so the long lane has all of its budget
    engine.add("short", range(5), max_tokens=2)
    for number in range(2, 30):
        engine.add(f"l{number}", [number, *range(20)], max_tokens=12)
    first_token_step(engine, "short", max_steps=40)
    assert [event.request_id for event in engine.events if event.finish] == ["l0"]


def test_a_long_prompt_gets_its_blocks_under_a_flood_of_short_ones(make_engine):
    """Short prompts need few blocks, so they would take all that fall free before enough are for a long one."""
    engine = make_engine(num_blocks=32, block_size=4, max_num_batched_tokens=24, max_num_seqs=16)
    numbers = iter(range(1000))

    def top_up() -> None:
        while engine.core.stats().num_waiting < 6:
            number = next(numbers)
            engine.add(f"s{number}", [number % 90, number // 90, 3, 4, 5], max_tokens=12 + number % 7)

    for _ in range(20):
        top_up()
        engine.step()
    assert engine.core.stats().kv_blocks_used > 16, "the short prompts were to fill the pool"
    engine.add("long", range(80), max_tokens=2)
    for step in range(200):
        top_up()
        if any(event.request_id == "long" for event in engine.step()):
            assert step < 60
            return
    raise AssertionError("the long prompt is starved")


def test_long_prompts_are_served_one_after_the_other(make_engine):
    """Many long prompts at once, each with a sliver of the budget, would all be late; and each would hold blocks."""
    engine = make_engine(max_num_batched_tokens=32, num_blocks=200)
    for number in range(3):
        engine.add(f"l{number}", [number, *range(80)], max_tokens=1)
    engine.run()
    ends = [event.request_id for event in engine.events if event.finish]
    assert ends == ["l0", "l1", "l2"]
    assert engine.executor.num_tokens == [32] * 7 + [19]


def test_more_places_than_budget(make_engine):
    """Decodes that fill the budget for good would leave the sequences at the end of the list without a step."""
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=3)
    for number in range(8):
        engine.add(f"r{number}", [number, 1, 2, 3, 4, 5, 6], max_tokens=30)
    while engine.core.has_work:
        engine.step()
        assert engine.core.stats().num_running <= 3, "a running sequence cannot get a step"
    for number in range(8):
        assert engine.tokens(f"r{number}") == engine.expected(f"r{number}", 30)
