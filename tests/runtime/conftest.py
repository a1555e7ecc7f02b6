"""A scripted engine: an executor and a sampler that need no model, and check what they are given.

The model: the next token is a function of all tokens before it, read from the fake KV pool through the block table. So
a wrong block, slot, copy, prefix hit or recomputation gives a wrong token, and every way of batching must give the
tokens of `ScriptedModel.continuation`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from castline.plugins.contract import StepTensors
from castline.runtime.client import EffectiveLimits
from castline.runtime.core import EngineCore
from castline.runtime.events import Finish, SequenceEvent, TokenLogprobs
from castline.runtime.plan import StepPlan
from castline.runtime.request import Request
from castline.runtime.sampler_api import Sampler, SampleResult
from castline.runtime.sampling_params import SamplingParams

VOCAB_SIZE = 97
EOS = 96


class ScriptedModel:
    """``scripted`` overrides the token at a total length, for endings.

    With ``memory`` it sees that many tokens only, and has a few favourites: its texts run in loops, which change now
    and then.
    """

    def __init__(self) -> None:
        self.scripted: dict[int, int] = {}
        self.memory: int | None = None

    def next_token(self, tokens: Sequence[int]) -> int:
        """Any token but EOS, unless scripted."""
        if len(tokens) in self.scripted:
            return self.scripted[len(tokens)]
        state, modulus = 7, EOS
        if self.memory is not None:
            state, modulus, tokens = len(tokens) // 17, 3, tokens[-self.memory :]
        for token in tokens:
            state = (state * 31 + int(token) + 1) % 1_000_003
        return state % modulus

    def continuation(self, prompt: Sequence[int], count: int, index: int = 0) -> tuple[int, ...]:
        """The slow reference: *count* tokens after *prompt* for continuation *index*, with no batching or cache."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(shifted(self.next_token(tokens), index))
        return tuple(tokens[len(prompt) :])


class ScriptedExecutor:
    """A KV pool of token ids by slot. Asserts the step contract, and the pool's content against ``truth`` if set."""

    vocab_size = VOCAB_SIZE
    maxima = None

    def __init__(self, model: ScriptedModel, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.block_size = block_size
        self.slots = np.full(num_blocks * block_size, -1, np.int64)
        self.fail: Callable[[StepTensors], None] | None = None
        self.truth: Callable[[], list[list[int]]] | None = None
        self.num_tokens: list[int] = []
        """Tokens of each step executed."""
        self.copied: list[tuple[int, int]] = []

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        blocks = self.slots.reshape(-1, self.block_size)
        for source, destination in copies:
            blocks[destination] = blocks[source]
        self.copied.extend(copies)

    def execute(self, step: StepTensors) -> np.ndarray:
        cu = step.cu_query_lens
        count = len(step.kv_lens)
        assert (cu[0], cu[-1]) == (0, len(step.input_ids))
        assert (np.diff(cu) > 0).all()
        assert len(set(step.slot_mapping.tolist())) == len(step.slot_mapping), "two tokens write one slot"
        self.slots[step.slot_mapping] = step.input_ids
        contexts = [self._context(step, number) for number in range(count)]
        if self.truth is not None:
            assert contexts == self.truth()
        if self.fail is not None:
            self.fail(step)
        self.num_tokens.append(len(step.input_ids))
        logits = np.full((len(step.logits_indices), VOCAB_SIZE), -9.0, np.float32)
        for row, token in enumerate(step.logits_indices.tolist()):
            number = int(np.searchsorted(cu, token, side="right")) - 1
            seen = int(step.positions[token]) + 1
            logits[row, self.model.next_token(contexts[number][:seen])] = 1.0
        return logits

    def _context(self, step: StepTensors, number: int) -> list[int]:
        """What the sequence's block table reaches: its tokens 0 .. kv_len."""
        begin, end, kv_len = step.cu_query_lens[number], step.cu_query_lens[number + 1], step.kv_lens[number]
        positions = np.arange(kv_len)
        assert step.positions[begin:end].tolist() == positions[kv_len - (end - begin) :].tolist()
        slots = step.block_table[number, positions // self.block_size] * self.block_size + positions % self.block_size
        assert step.slot_mapping[begin:end].tolist() == slots[kv_len - (end - begin) :].tolist()
        return [int(token) for token in self.slots[slots]]

    def close(self) -> None: ...


class ScriptedSampler:
    """The model's token, shifted by the continuation's index."""

    def __init__(self) -> None:
        self.sequences: dict[int, tuple[SamplingParams, int]] = {}

    def add(self, seq_key: int, params: SamplingParams, prompt_token_ids: Sequence[int], index: int) -> None:
        assert seq_key not in self.sequences
        self.sequences[seq_key] = (params, index)

    def remove(self, seq_key: int) -> None:
        del self.sequences[seq_key]

    def sample(self, logits: np.ndarray, seq_keys: Sequence[int], maxima: np.ndarray | None = None) -> SampleResult:
        assert logits.shape == (len(seq_keys), VOCAB_SIZE)
        best = zip(logits.argmax(axis=1).tolist(), seq_keys, strict=True)
        tokens = [shifted(token, self.sequences[key][1]) for token, key in best]
        wanted = [self.sequences[key][0].logprobs is not None for key in seq_keys]
        logprobs = [_logprobs(token) if want else None for token, want in zip(tokens, wanted, strict=True)]
        return SampleResult(tokens, logprobs)

    def prompt_logprobs(self, logits: np.ndarray, next_token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """``rank`` is what the model would have chosen: it tells which row the answer came from."""
        chosen = logits.argmax(axis=1).tolist()
        assert len(chosen) == len(next_token_ids)
        return [
            structs.replace(_logprobs(token), rank=best) for token, best in zip(next_token_ids, chosen, strict=True)
        ]


def shifted(token: int, index: int) -> int:
    """The token of continuation *index*, so that the n continuations differ; EOS stays."""
    return token if token == EOS else (token + 5 * index) % EOS


def _logprobs(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1, ((token, -0.5),))


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """An engine core over the scripted parts, and everything it has said."""

    def __init__(
        self,
        limits: EffectiveLimits,
        sampler: Sampler | None = None,
        eos_token_ids: Collection[int] = (EOS,),
        device: Callable[[ScriptedExecutor], Any] | None = None,
        **options: Any,
    ) -> None:
        """*device* makes an executor that samples out of the scripted one, which is told when to compute."""
        self.limits = limits
        self.model = ScriptedModel()
        self.executor = ScriptedExecutor(self.model, limits.num_blocks, limits.block_size)
        self.sampler = ScriptedSampler() if sampler is None else sampler
        self.clock = FakeClock()
        self.device = device(self.executor) if device else None
        self.core = EngineCore(
            self.device or self.executor, limits, eos_token_ids, self.sampler, clock=self.clock, **options
        )
        self.plans: list[StepPlan] = []
        self.events: list[SequenceEvent] = []
        self.requests: dict[str, Request] = {}
        self._observe_plans()

    def _observe_plans(self) -> None:
        scheduler = self.core.scheduler
        schedule = scheduler.schedule

        def observed(*args: Any, **kwargs: Any) -> StepPlan:
            plan = schedule(*args, **kwargs)
            self.plans.append(plan)
            assert plan.num_tokens <= self.limits.max_num_batched_tokens
            assert len(plan.scheduled) <= self.limits.max_num_seqs
            assert scheduler.num_running <= self.limits.max_num_seqs
            assert all(part.num_drafts <= self.limits.max_drafts for part in plan.scheduled)
            return plan

        def truth() -> list[list[int]]:
            parts = self.plans[-1].scheduled
            known = [scheduler.get(part.seq_id).token_ids for part in parts]
            for part, tokens in zip(parts, known, strict=True):
                sure = part.token_ids[: len(part.token_ids) - part.num_drafts]
                assert list(sure) == tokens[part.start : part.start + len(sure)]
                assert part.num_drafts == 0 or part.start + len(sure) == len(tokens), "guesses go at the end"
            return [tokens[: part.start] + list(part.token_ids) for part, tokens in zip(parts, known, strict=True)]

        scheduler.schedule = observed
        if self.device is None:  # else the tokens of a step are not known when it is planned
            self.executor.truth = truth

    def add(self, request_id: str, prompt: Sequence[int], **params: Any) -> Request:
        extra = {key: params.pop(key) for key in ("deadline", "cache_salt", "streams") if key in params}
        params.setdefault("temperature", 0.0)
        request = Request(request_id, tuple(prompt), SamplingParams(**params), arrival_time=self.clock.now, **extra)
        self.requests[request_id] = request
        self.core.add_request(request)
        return request

    def step(self) -> list[SequenceEvent]:
        events = self.core.step()
        self.events += events
        self.core.scheduler.check()
        return events

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("livelock")

    def tokens(self, request_id: str, index: int = 0) -> tuple[int, ...]:
        return tuple(t for e in self.events if (e.request_id, e.index) == (request_id, index) for t in e.token_ids)

    def finish(self, request_id: str, index: int = 0) -> Finish:
        """The one terminal event's, which is the last."""
        mine = [e for e in self.events if (e.request_id, e.index) == (request_id, index)]
        assert [e for e in mine if e.finish] == mine[-1:], f"not exactly one terminal event, at the end: {mine}"
        assert [e for e in mine if e.cached_tokens is not None] == mine[:1], "cached_tokens belongs on the first event"
        finish = mine[-1].finish
        assert finish is not None
        return finish

    def first_event(self, request_id: str, index: int = 0) -> SequenceEvent:
        return next(e for e in self.events if (e.request_id, e.index) == (request_id, index))

    def expected(self, request_id: str, count: int, index: int = 0) -> tuple[int, ...]:
        return self.model.continuation(self.requests[request_id].prompt_token_ids, count, index)

    def assert_forgotten(self) -> None:
        """Idle: every block is free and nothing of any request is left."""
        core, scheduler = self.core, self.core.scheduler
        assert not core.has_work
        assert core.stats().kv_blocks_used == 0
        assert not scheduler.groups
        assert not scheduler._roster.sequences
        assert not scheduler._roster.running
        assert not scheduler._roster.waiting
        assert not scheduler.kv._computing
        assert not core._deadlines
        assert not core._suspects
        assert not self.sampler.sequences


@dataclass(frozen=True)
class EngineFactory:
    """Limits of a small engine; override by keyword."""

    def __call__(self, **overrides: Any) -> Engine:
        named = ("policy", "sampler", "eos_token_ids", "device", "marks")
        options = {key: overrides.pop(key) for key in named if key in overrides}
        return Engine(limits(**overrides), **options)


def limits(**overrides: Any) -> EffectiveLimits:
    values = {
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "num_blocks": 64,
        **overrides,
    }
    concurrency = values["num_blocks"] * values["block_size"] / values["max_model_len"]
    return EffectiveLimits(max_concurrency=concurrency, **values)


@pytest.fixture
def make_engine() -> EngineFactory:
    return EngineFactory()


@pytest.fixture
def make_limits() -> Callable[..., EffectiveLimits]:
    return limits
