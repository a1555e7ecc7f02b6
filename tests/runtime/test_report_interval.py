"""Tokens that wait for others: beside an engine that reports each at once, and takes the same steps.

Neither reads what it has reported, so both compute the same, and after every step they can be compared.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from msgspec import structs

from castline.engines.errors import EngineError, ErrorCode
from castline.runtime.events import FinishReason
from castline.runtime.sampler_api import BrokenLogits

EOS = 96
LOOP = (1, 2, 3, 4) * 3

OPTIONS = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([0, 1, 2, 9, 30, 30]), "streams": st.booleans()},
    optional={
        "n": st.sampled_from([2, 3]),
        "stop_token_ids": st.sampled_from([(0,), (1, 2), tuple(range(10, 30))]),
        "min_tokens": st.just(6),
        "ignore_eos": st.just(True),
        "patience": st.sampled_from([2, 8, 15]),
    },
)
EXTRAS = st.sampled_from([{}, {}, {}, {"stop": ("x",)}, {"logprobs": 1}, {"prompt_logprobs": 0}])
REQUESTS = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=25), OPTIONS, EXTRAS)
ABORTS = st.tuples(st.integers(0, 5), st.sampled_from([None, 0, 1]))


class Pair:
    """The engine under test and the reference, which reports each token at once: both get the same, step by step."""

    def __init__(self, make_engine, *, breaks_at=None, fails=(), memory=None, **limits):
        """Executions numbered in *fails* fail; every third continuation's logits break after *breaks_at* tokens."""
        self.engine, self.plain = engines = [make_engine(max_model_len=60, **limits) for _ in range(2)]
        for engine in engines:
            engine.model.memory = memory
            engine.model.scripted = {33: EOS, 47: EOS}
            fail_at(engine, set(fails))
            if breaks_at is not None:
                break_logits(engine, breaks_at)
        self.interval_of: dict[int, int] = {}
        """The interval at which the engine under test reported event number so and so."""

    @property
    def has_work(self) -> bool:
        assert self.engine.core.has_work == self.plain.core.has_work
        return self.engine.core.has_work

    def add(self, request_id, prompt, *, streams=True, patience=None, **params):
        """*patience*: steps until its deadline."""
        if params["max_tokens"] == 0:
            params.pop("min_tokens", None)
        if params["max_tokens"] is not None and params.get("min_tokens", 0) > params["max_tokens"]:
            params["min_tokens"] = params["max_tokens"]
        deadline = None if patience is None else self.engine.clock.now + patience
        self.engine.add(request_id, prompt, deadline=deadline, streams=streams, **params)
        self.plain.add(request_id, prompt, deadline=deadline, **params)

    def abort(self, request_id, index=None):
        for engine in (self.engine, self.plain):
            engine.core.abort(request_id, index)

    def step(self, interval: int):
        self.engine.core.report_interval = interval
        for engine in (self.engine, self.plain):
            engine.clock.now += 1
        reported, brought = self.engine.step(), self.plain.step()
        first = len(self.engine.events) - len(reported)
        self.interval_of |= dict.fromkeys(range(first, len(self.engine.events)), interval)
        for one in brought:
            self._check_waiting(one.request_id, one.index, interval)
        assert ends(reported) == ends(brought), "an end is told in the step it belongs to"

    def run(self, interval: int):
        while self.has_work:
            self.step(interval)

    def _check_waiting(self, request_id, index, interval):
        """Of a continuation that got tokens in this step, or ended."""
        had, known = self.engine.tokens(request_id, index), self.plain.tokens(request_id, index)
        request = self.engine.requests[request_id]
        mine = [e for e in self.engine.events if (e.request_id, e.index) == (request_id, index)]
        assert had == known[: len(had)]
        if mine[-1].finish is not None or not may_wait(request):
            assert had == known
        elif request.streams:
            assert len(known) - len(had) < interval
        else:
            assert len(mine) == 1, "the first token, and nothing before the end"

    def check_answers(self):
        """Once all have ended."""
        assert self.engine.core.stats() == self.plain.core.stats()
        for request_id, request in self.engine.requests.items():
            for index in range(request.params.n):
                assert answer(self.engine, request_id, index) == answer(self.plain, request_id, index)
                self._check_cuts(request_id, index)
        self.engine.assert_forgotten()

    def _check_cuts(self, request_id, index):
        request = self.engine.requests[request_id]
        mine = [(n, e) for n, e in enumerate(self.engine.events) if (e.request_id, e.index) == (request_id, index)]
        assert all(e.token_ids or e.finish for _, e in mine), "an event that says nothing"
        if not may_wait(request):
            assert len(mine) == sum((e.request_id, e.index) == (request_id, index) for e in self.plain.events)
        elif request.streams:
            assert all(len(e.token_ids) >= self.interval_of[number] for number, e in mine[1:-1])
        else:
            assert len(mine) <= 2


def may_wait(request) -> bool:
    return not request.params.stop and request.params.logprobs is None


def ends(events):
    return Counter((e.request_id, e.index) for e in events if e.finish is not None)


def answer(engine, request_id, index):
    """All that is said of a continuation, but how its tokens were spread over events."""
    events = [e for e in engine.events if (e.request_id, e.index) == (request_id, index)]
    if engine.requests[request_id].params.logprobs is None:
        assert {e.logprobs for e in events} == {None}
    else:
        assert all(len(e.logprobs) == len(e.token_ids) for e in events)
    logprobs = tuple(entry for e in events for entry in e.logprobs or ())
    said_once = structs.replace(events[0], token_ids=(), logprobs=None, finish=None)
    return engine.tokens(request_id, index), engine.finish(request_id, index), logprobs, said_once


def fail_at(engine, executions):
    def fail(step) -> None:
        nonlocal count
        count += 1
        if count in executions:
            raise EngineError("sometimes")

    count = 0
    engine.executor.fail = fail


def break_logits(engine, num_tokens):
    """Every third continuation has that many tokens, and cannot have another."""
    sample, given_to = engine.sampler.sample, Counter()

    def sample_or_break(logits, seq_keys, maxima=None):
        broken = {key: "NaN" for key in seq_keys if key % 3 == 1 and given_to[key] == num_tokens}
        if broken:
            raise BrokenLogits(broken)
        given_to.update(seq_keys)
        return sample(logits, seq_keys)

    engine.sampler.sample = sample_or_break


@settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=6),
    paces=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    aborts=st.dictionaries(st.integers(1, 40), ABORTS, max_size=4),
    fails=st.sets(st.integers(1, 40), max_size=3),
    breaks_at=st.sampled_from([None, None, 0, 5, 12]),
    max_drafts=st.sampled_from([0, 4, 7]),
    num_blocks=st.sampled_from([16, 24, 100]),
    budget=st.sampled_from([6, 15, 64]),
    memory=st.sampled_from([None, 1, 2]),
)
def test_waiting_changes_the_cuts_only(
    make_engine, requests, paces, aborts, fails, breaks_at, max_drafts, num_blocks, budget, memory
):
    """Tokens must not be lost, doubled, reordered or late, nor come after an end: with intervals that change, forks,
    guesses, stop tokens, preemption, failed steps, broken logits, deadlines and aborts."""
    limits = {"max_drafts": max_drafts, "num_blocks": num_blocks, "max_num_batched_tokens": budget}
    pair = Pair(make_engine, breaks_at=breaks_at, fails=fails, memory=memory, **limits)
    arriving, step = list(enumerate(requests)), 0
    while pair.has_work or arriving:
        if arriving and (step % 2 == 0 or not pair.has_work):
            number, (prompt, options, extras) = arriving.pop(0)
            pair.add(f"r{number}", prompt, **options, **extras)
        if step in aborts:
            number, index = aborts[step]
            pair.abort(f"r{number}", index)
        pair.step(paces[step % len(paces)])
        step += 1
    pair.check_answers()
    stats = pair.engine.core.stats()
    event(f"preempted: {stats.preemptions > 0}")
    event(f"guessed right: {stats.spec_accepted_tokens > 0}")


def cuts(engine, request_id, index=0):
    return [len(e.token_ids) for e in engine.events if (e.request_id, e.index) == (request_id, index)]


def test_events_of_a_lone_stream(make_engine):
    """The first token must not wait; the others come by the interval, and the last with what is left."""
    pair = Pair(make_engine)
    pair.add("r", range(10), max_tokens=20, ignore_eos=True)
    pair.run(8)
    assert cuts(pair.engine, "r") == [1, 8, 8, 3]
    pair.check_answers()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"streams": False}, [1, 19]),
        ({"stop": ("x",)}, [1] * 20),
        ({"stop": ("x",), "streams": False}, [1] * 20),
        ({"logprobs": 0}, [1] * 20),
        ({"logprobs": 0, "streams": False}, [1] * 20),
        ({"prompt_logprobs": 0}, [1, 4, 4, 4, 4, 3]),
    ],
)
def test_who_waits_how_long(make_engine, params, expected):
    """A reader of the whole costs two events; whoever must look at each token gets it at once. Neighbours share steps
    and nothing else."""
    pair = Pair(make_engine)
    pair.add("beside", range(20, 30), max_tokens=20, ignore_eos=True)
    pair.add("r", range(10), max_tokens=20, ignore_eos=True, **params)
    pair.run(4)
    assert cuts(pair.engine, "r") == expected
    assert cuts(pair.engine, "beside") == [1, 4, 4, 4, 4, 3]
    pair.check_answers()


def test_an_interval_that_becomes_short_lets_out_what_waits(make_engine):
    """At the end of a load, the streams that are left must be as prompt as any at once."""
    pair = Pair(make_engine)
    pair.add("r", range(10), max_tokens=20, ignore_eos=True)
    for interval in [8] * 6 + [1] * 4 + [2] * 4 + [1]:
        pair.step(interval)
    assert cuts(pair.engine, "r") == [1, 6, 1, 1, 1, 2, 2, 1]


def test_accepted_guesses_wait_like_other_tokens(make_engine):
    """Steps bring several tokens: an interval counts tokens, not steps, and a stop token among them ends the text."""
    pair = Pair(make_engine, max_drafts=7, num_blocks=64, memory=1)
    pair.add("r", LOOP, max_tokens=40, ignore_eos=True)
    pair.add("stops", (*LOOP, 2), max_tokens=40, ignore_eos=True, stop_token_ids=(0,), min_tokens=14, streams=False)
    pair.run(4)
    assert pair.engine.core.stats().spec_accepted_tokens > 10
    assert pair.engine.finish("stops").reason is FinishReason.STOP
    assert len(cuts(pair.engine, "stops")) == 2
    assert max(cuts(pair.engine, "r")) > 4
    pair.check_answers()


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("way", ["abort", "deadline", "failed step", "broken logits"])
def test_an_early_end_brings_what_waits(make_engine, way, streams):
    """Tokens that were generated belong to the answer, or to the usage that it is billed by, however it ends."""
    pair = Pair(make_engine, breaks_at=6 if way == "broken logits" else None, fails={7} if way == "failed step" else ())
    if way == "broken logits":
        pair.add("spared", range(3), max_tokens=1)  # the next one's logits break
    deadline = {"patience": 6} if way == "deadline" else {}
    pair.add("r", range(10), max_tokens=20, ignore_eos=True, streams=streams, **deadline)
    for _ in range(6):
        pair.step(8)
    if way == "abort":
        pair.abort("r")
    pair.run(8)
    codes = {
        "abort": ErrorCode.CANCELLED,
        "deadline": ErrorCode.DEADLINE_EXCEEDED,
        "failed step": ErrorCode.ENGINE_FAILED,
        "broken logits": ErrorCode.ENGINE_FAILED,
    }
    assert pair.engine.finish("r").error_code is codes[way]
    assert cuts(pair.engine, "r") == [1, 4 if way == "deadline" else 5]
    pair.check_answers()


def test_preempted_tokens_are_not_reported_again(make_engine):
    """What is computed again was reported once, or waits still."""
    pair = Pair(make_engine, num_blocks=16, max_num_batched_tokens=8)
    for number in range(3):
        pair.add(f"r{number}", range(number, number + 8), max_tokens=30, ignore_eos=True, streams=number < 2)
    pair.run(8)
    assert pair.engine.core.stats().preemptions > 0
    pair.check_answers()
