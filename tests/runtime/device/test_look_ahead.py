"""The step after one that is being executed: what the scheduler would plan then, or nothing."""

from collections.abc import Callable

import pytest

from castline.runtime.client import EffectiveLimits
from castline.runtime.look_ahead import UNKNOWN_TOKEN
from castline.runtime.plan import StepPlan
from castline.runtime.request import Request
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.scheduler import Scheduler


class Line:
    """A scheduler whose sequences get token 7, and the requests in it by name."""

    def __init__(self, limits: EffectiveLimits) -> None:
        self.scheduler = Scheduler(limits, ())

    def add(self, name: str, num_tokens: int, salt: str | None = None, **params: int) -> None:
        """Requests of the same *salt* share their prompts; without one, a request shares nothing."""
        prompt = tuple(range(num_tokens))
        self.scheduler.add(Request(name, prompt, SamplingParams(**params), cache_salt=salt or name))

    def commit(self, plan: StepPlan) -> None:
        self.scheduler.commit(plan, {part.seq_id: [7] for part in plan.scheduled if part.samples})

    def decode_once(self) -> StepPlan:
        """Commits steps until every sequence that runs decodes; the next step, not committed."""
        while True:
            plan = self.scheduler.schedule()
            if all(part.samples and len(part.token_ids) == 1 for part in plan.scheduled):
                return plan
            self.commit(plan)


@pytest.fixture
def make_line(make_limits: Callable[..., EffectiveLimits]) -> Callable[..., Line]:
    return lambda **limits: Line(make_limits(**limits))


def test_it_is_what_would_be_scheduled(make_line):
    """Blocks, positions and rows of a step ahead must be those of the step that it stands for, block by block."""
    line = make_line(block_size=4)
    for name, length in (("a", 3), ("b", 4), ("c", 9)):
        line.add(name, length, max_tokens=50)
    plan = line.decode_once()
    for _ in range(12):
        ahead = line.scheduler.look_ahead(plan)
        line.commit(plan)
        plan = line.scheduler.schedule()
        assert [part.token_ids for part in ahead.scheduled] == [(UNKNOWN_TOKEN,)] * 3
        same = [(part.seq_id, part.start, part.block_ids, part.samples, part.all_logits) for part in ahead.scheduled]
        assert same == [(p.seq_id, p.start, p.block_ids, p.samples, p.all_logits) for p in plan.scheduled]
        assert (ahead.block_copies, ahead.preempted) == ((), ())


def test_a_prompts_last_chunk_is_followed_too(make_line):
    """The first token of a prompt is drawn like any other; a prompt that has more to compute is not skipped."""
    line = make_line(max_num_batched_tokens=8)
    line.add("a", 12, max_tokens=9)
    first = line.scheduler.schedule()
    assert line.scheduler.look_ahead(first) is None
    line.commit(first)
    (part,) = line.scheduler.look_ahead(line.scheduler.schedule()).scheduled
    assert part.start == 12


def test_texts_that_their_length_ends_have_no_more_steps(make_line):
    """A token past the greatest length would be computed for nothing, or past the end of the table."""
    line = make_line()
    line.add("a", 3, max_tokens=3)
    line.add("b", 3, max_tokens=4)
    plan = line.decode_once()
    assert len(line.scheduler.look_ahead(plan).scheduled) == 2
    line.commit(plan)
    plan = line.scheduler.schedule()
    assert [part.seq_id for part in line.scheduler.look_ahead(plan).scheduled] == [1]
    line.commit(plan)
    assert line.scheduler.look_ahead(line.scheduler.schedule()) is None


def test_those_that_have_ended_are_left_out(make_line):
    """The plan in flight still names them."""
    line = make_line()
    line.add("a", 3, max_tokens=9)
    line.add("b", 3, max_tokens=9)
    plan = line.decode_once()
    line.scheduler.remove(line.scheduler.get(0))
    assert [part.seq_id for part in line.scheduler.look_ahead(plan).scheduled] == [1]


def test_nobody_who_runs_is_left_behind(make_line):
    """A step for some of them (suspects, or those that found blocks) is followed by one that is scheduled."""
    line = make_line()
    line.add("a", 3, max_tokens=9)
    line.add("b", 3, max_tokens=9)
    line.commit(line.decode_once())
    assert line.scheduler.look_ahead(line.scheduler.schedule(only={0})) is None


def test_continuations_are_not_kept_waiting(make_line):
    """They fork when the prompt has been computed: in the very next step."""
    line = make_line()
    line.add("a", 3, max_tokens=9, n=3)
    first = line.scheduler.schedule()
    assert line.scheduler.look_ahead(first) is None
    line.commit(first)
    assert len(line.scheduler.schedule().scheduled) == 3


def test_those_that_wait_for_a_prompt_are_not_kept_waiting(make_line):
    """They start from its blocks when it has been computed: in the very next step."""
    line = make_line(block_size=4)
    for name in "ab":
        line.add(name, 9, salt="shared", max_tokens=9)
    first = line.scheduler.schedule()
    assert len(first.scheduled) == 1
    assert line.scheduler.look_ahead(first) is None
    line.commit(first)
    assert [part.start for part in line.scheduler.schedule().scheduled] == [9, 8]


def test_a_pool_that_is_short_is_left_as_it_is(make_line):
    """Preemption is for the scheduler to decide, and half of a reservation would be a leak."""
    line = make_line(num_blocks=5, block_size=2, max_model_len=10)
    line.add("a", 4, max_tokens=5)
    line.add("b", 3, max_tokens=5)
    plan = line.decode_once()
    blocks = [line.scheduler.get(seq_id).block_ids for seq_id in range(2)]
    assert line.scheduler.kv.pool.num_free == 0
    assert line.scheduler.look_ahead(plan) is None
    assert [line.scheduler.get(seq_id).block_ids for seq_id in range(2)] == blocks


def test_what_was_reserved_ahead_is_given_back_with_the_step(make_line):
    """A step that fails takes the one behind it along: its blocks must be free again."""
    line = make_line(block_size=2)
    line.add("a", 4, max_tokens=50)
    plan = line.decode_once()
    line.commit(plan)
    plan = line.scheduler.schedule()
    used = line.scheduler.kv.pool.num_used
    assert line.scheduler.look_ahead(plan) is not None
    assert line.scheduler.kv.pool.num_used == used + 1
    line.scheduler.rollback(plan)
    line.scheduler.check()
    assert line.scheduler.kv.pool.num_used == used


@pytest.mark.parametrize(
    ("limits", "max_tokens", "goes_ahead"),
    [
        ({"max_num_seqs": 2}, 50, True),
        ({"max_num_seqs": 3}, 50, False),
        ({"max_num_seqs": 2}, 3, False),
        ({"max_num_seqs": 3, "num_blocks": 10, "max_model_len": 40}, 50, True),
    ],
    ids=["a full house", "a free place", "a place that becomes free", "no blocks"],
)
def test_who_waits_is_considered(make_line, limits, max_tokens, goes_ahead):
    """Someone who can be admitted must not wait for a step that was begun without him; one who cannot holds nobody
    up."""
    line = make_line(block_size=4, **limits)
    line.add("a", 3, max_tokens=max_tokens)
    line.add("b", 3, max_tokens=50)
    line.commit(line.decode_once())
    plan = line.scheduler.schedule()
    line.add("c", 35, max_tokens=2)
    assert (line.scheduler.look_ahead(plan) is not None) == goes_ahead
