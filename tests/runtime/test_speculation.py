"""Which guesses are worth it, and what they may take from a step."""

import random

import pytest

from castline.runtime.kv_manager import KvManager
from castline.runtime.plan import ScheduledSequence
from castline.runtime.request import Request
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.sequence import Sequence, new_group
from castline.runtime.speculation import Speculation, TextDrafts

LINEAR = {1: 0.001, 8: 0.008, 32: 0.032, 64: 0.064, 128: 0.128}
"""A device whose steps cost their tokens."""
CPU = {size: 0.004 + 0.0006 * size for size in LINEAR}
FREE = dict.fromkeys(LINEAR, 0.01)
LOOP = [1, 2, 3, 4, 5] * 4


class Text:
    """Sequences that decode, with their plan and their blocks."""

    def __init__(self, make_limits, texts, seconds, **limits) -> None:
        self.limits = make_limits(**{"max_drafts": 7, "max_num_batched_tokens": 512, "max_num_seqs": 64, **limits})
        self.kv = KvManager(self.limits.num_blocks, self.limits.block_size)
        self.speculation = Speculation(self.limits, seconds)
        self.sequences = {number: self.sequence(number, tokens) for number, tokens in enumerate(texts)}

    def sequence(self, number: int, tokens: list[int], stop: frozenset[int] = frozenset(), max_len: int = 100):
        request = Request(f"r{number}", tuple(tokens), SamplingParams())
        seq = new_group(request, stop, max_len, number).members[0]
        seq.own_tokens()
        seq.num_computed = len(tokens) - 1
        self.kv.reserve(seq, 1)
        for _ in range(-(-len(tokens) // self.limits.block_size) - len(seq.block_ids)):
            seq.block_ids += (self.kv.pool.allocate(),)
        return seq

    def plan(self, budget: int | None = None) -> list[ScheduledSequence]:
        plan = [
            ScheduledSequence(number, (seq.token_ids[-1],), seq.num_computed, seq.block_ids, samples=True)
            for number, seq in self.sequences.items()
        ]
        room = self.limits.max_num_batched_tokens - len(plan) if budget is None else budget
        return list(self.speculation.extend(plan, self.sequences, self.kv, room))

    def learn(self, seq: Sequence, num_drafts: int, num_accepted: int, times: int) -> None:
        seq.drafts = seq.drafts or TextDrafts()
        for _ in range(times):
            self.speculation.record(seq, num_drafts, num_accepted)


@pytest.fixture
def make_text(make_limits):
    return lambda texts, seconds, **limits: Text(make_limits, texts, seconds, **limits)


def drafts(plan: list[ScheduledSequence]) -> list[int]:
    return [part.num_drafts for part in plan]


def test_a_lone_loop_is_guessed_as_far_as_allowed(make_text):
    """At batch 1 more tokens are almost free, so a text that repeats itself takes all of them."""
    text = make_text([LOOP], CPU)
    (part,) = text.plan()
    assert part.token_ids == (5, 1, 2, 3, 4, 5, 1, 2)
    assert part.num_drafts == 7
    assert len(part.block_ids) * text.limits.block_size >= part.start + len(part.token_ids)


def test_no_match_costs_no_token(make_text):
    """Text that does not repeat itself is decoded as ever."""
    assert drafts(make_text([list(range(20))], CPU).plan()) == [0]


def test_where_tokens_cost_their_share_nothing_is_guessed(make_text):
    """A batch bound by arithmetic would get slower by every wrong guess and no faster by a right one."""
    assert not any(drafts(make_text([LOOP] * 32, LINEAR, num_blocks=400).plan()))


def test_in_a_large_batch_only_near_certain_guesses_pay(make_text):
    """At batch 32 on a CPU a token more costs 83 % of its share: matches of two tokens are right too seldom."""
    certain = make_text([LOOP] * 32, CPU, num_blocks=400)
    assert sum(drafts(certain.plan())) >= 32
    vague = [7, 8, 40, 41, 42, 43, 44, 7, 8]
    assert drafts(make_text([LOOP, *[vague] * 31], CPU, num_blocks=400).plan())[1:] == [0] * 31
    assert drafts(make_text([vague], CPU).plan())[0] > 0


def test_a_text_that_is_guessed_wrong_is_left_alone_and_tried_again(make_text):
    """Its own rate decides, the others keep guessing; and a text may begin to repeat itself later."""
    text = make_text([LOOP] * 32, CPU, num_blocks=600, max_num_seqs=256)
    text.plan()
    text.learn(text.sequences[0], 7, 0, times=6)
    for number in range(1, 32):
        text.learn(text.sequences[number], 7, 7, times=2)
    first = drafts(text.plan())
    assert first[0] == 0
    assert min(first[1:]) > 0
    tried = [drafts(text.plan())[0] for _ in range(60)]
    assert any(tried), "what is known against a text fades"
    assert tried.index(next(filter(None, tried))) > 3, "and not at once"


def test_what_all_texts_show_is_where_a_new_text_begins(make_text):
    """Traffic whose texts never go on as they did should not pay for seven guesses a request."""
    text = make_text([LOOP] * 8, CPU, num_blocks=400)
    before = drafts(text.plan())[7]
    for number in range(7):
        text.learn(text.sequences[number], 7, 0, times=20)
    assert drafts(text.plan())[7] < before


def test_now_and_then_every_guess_is_taken(make_text):
    """Without, the price of a token would never be measured again after one bad measurement."""
    text = make_text([LOOP] * 32, LINEAR, num_blocks=400)
    taken = [sum(drafts(text.plan())) for _ in range(512)]
    assert sum(map(bool, taken)) == 2


def test_guesses_stop_before_a_token_that_would_end_the_text(make_text):
    """A run of right guesses must not pass the end: what is sampled after it would be lost, or an error."""
    text = make_text([LOOP], FREE)
    text.sequences = {0: text.sequence(0, LOOP, stop=frozenset([3]))}
    (part,) = text.plan()
    assert part.token_ids == (5, 1, 2)


@pytest.mark.parametrize(("room", "expected"), [(1, 0), (2, 1), (4, 3), (50, 7)])
def test_guesses_stop_before_the_longest_length(make_text, room, expected):
    """The step samples one token besides the guesses, and the last token of a sequence is never computed."""
    text = make_text([LOOP], FREE)
    text.sequences = {0: text.sequence(0, LOOP, max_len=len(LOOP) + room)}
    assert drafts(text.plan()) == [expected]


@pytest.mark.parametrize("budget", [0, 1, 9, 500])
def test_guesses_take_what_the_budget_leaves(make_text, budget):
    """Real work has been planned before."""
    text = make_text([LOOP] * 4, FREE, num_blocks=400)
    assert sum(drafts(text.plan(budget))) == min(budget, 28)


def test_guesses_of_a_step_are_bounded(make_text):
    """Each is a row of logits: 64 sequences with 7 guesses would take 88 MB of them."""
    text = make_text([LOOP] * 20, FREE, num_blocks=400, max_num_seqs=20)
    plans = [drafts(text.plan()) for _ in range(20)]
    assert {sum(plan) for plan in plans} == {20}
    assert all(map(any, zip(*plans, strict=True))), "and all get their turn"


@pytest.mark.parametrize("shared", [False, True])
def test_guesses_take_free_blocks_only(make_text, shared):
    """Nothing is preempted for a guess; where no block is free it ends with the block it has.

    So too where a fork of the same step shares that block: the token before the guess has its place in it already.
    """
    text = make_text([[*LOOP, 1, 2]], FREE, num_blocks=6, block_size=4)
    if shared:
        text.kv.pool.share(text.sequences[0].block_ids[-1])
    assert text.kv.pool.num_free == 0
    (part,) = text.plan()
    assert part.token_ids == (2, 3, 4)
    assert text.kv.block_copies == ()


def test_a_random_text_is_rarely_guessed(make_text):
    """Random pairs come back by chance; they must not cost a lone stream much of its steps."""
    rng = random.Random(3)
    text = make_text([[rng.randrange(40) for _ in range(90)]], CPU, num_blocks=400, max_model_len=4000)
    total = 0
    (seq,) = text.sequences.values()
    seq.max_len = 4000
    for _ in range(1000):
        (part,) = text.plan()
        total += part.num_drafts
        if part.num_drafts:
            text.kv.trim(seq)
            text.speculation.record(seq, part.num_drafts, 0)
        seq.token_ids.append(rng.randrange(40))
        seq.num_computed += 1
        text.kv.reserve(seq, 1)
    assert total < 700
