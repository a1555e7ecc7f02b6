"""The parity gate: the measure's arithmetic, the replay through a paged pool, and what the gate lets pass."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from castline.builder.parity import Comparison, kl_divergence, log_softmax
from castline.builder.recipes import Tolerance
from castline.builder.replay import DECODE, blocks_needed, make_tracks, replay
from castline.builder.verify import (
    DECODE_ROWS,
    Measured,
    VerifyCase,
    judge,
    measure,
    require_verified,
    shipped_case,
)
from castline.engines.errors import BuildError
from castline.engines.manifest import Limits
from castline.plugins.contract import StepTensors

VOCAB = 50
BLOCK_SIZE = 4


class ToyModel:
    """Logits from a decayed sum over the whole context: a wrong block, slot or position changes them."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.embedding = random.standard_normal((VOCAB, 16)).astype(np.float32)
        self.head = random.standard_normal((16, VOCAB)).astype(np.float32)

    def context_logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after the last of *tokens*."""
        decay = 0.8 ** np.arange(len(tokens))[::-1]
        state = (decay[:, None] * self.embedding[list(tokens)]).sum(axis=0)
        return np.asarray(state @ self.head, np.float32)

    def reference(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        return np.stack([self.context_logits(tokens[: end + 1]) for end in range(len(tokens))])


class ToyEngine:
    """The toy model over a pool of token ids, read and written only through the step's tensors."""

    def __init__(self, model: ToyModel, num_blocks: int, scale: float = 1.0) -> None:
        self.model, self.scale = model, scale
        self.pool = np.full(num_blocks * BLOCK_SIZE, -1)
        self.steps: list[StepTensors] = []

    def step(self, tensors: StepTensors) -> NDArray[np.float32]:
        self.steps.append(tensors)
        self.pool[tensors.slot_mapping] = tensors.input_ids
        rows = []
        for sequence, (start, stop) in enumerate(zip(tensors.cu_query_lens, tensors.cu_query_lens[1:], strict=False)):
            kv_len = tensors.kv_lens[sequence]
            slots = tensors.block_table[sequence][:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)
            context = self.pool[slots.reshape(-1)[:kv_len]]
            for query in range(stop - start):
                position = kv_len - (stop - start) + query
                assert tensors.positions[start + query] == position
                rows.append(self.model.context_logits(context[: position + 1].tolist()))
        return np.stack(rows)[tensors.logits_indices] * self.scale


def toy_case(seed: int = 1) -> VerifyCase:
    random = np.random.default_rng(seed)
    sequences = [tuple(random.integers(0, VOCAB, length).tolist()) for length in (61, 17, 1, 40, 9)]
    return VerifyCase(passages=tuple(sequences), prompts=tuple(s[:5] for s in sequences), greedy_tokens=12)


LIMITS = Limits(max_model_len=128, block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=64)


def run(case: VerifyCase, engine: ToyEngine, limits: Limits = LIMITS) -> Measured:
    return measure(case, engine, engine.model.reference, limits)


def test_log_softmax_is_stable() -> None:
    """Logits of a real head reach hundreds: a naive exponential overflows to NaN."""
    np.testing.assert_allclose(np.exp(log_softmax(np.array([[1000.0, 1000.0]]))), [[0.5, 0.5]])


def test_kl_by_hand() -> None:
    """KL(p ‖ q) and not KL(q ‖ p), in nats."""
    p, q = np.array([[0.5, 0.5]]), np.array([[0.9, 0.1]])
    expected = 0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)
    assert kl_divergence(np.log(p), np.log(q))[0] == pytest.approx(expected)
    assert kl_divergence(np.log(q), np.log(p))[0] != pytest.approx(expected)


def test_kl_of_equals_is_zero() -> None:
    """An engine equal to its reference has no distance, not a rounding error below zero."""
    p = log_softmax(np.random.default_rng(0).standard_normal((20, VOCAB)))
    assert (kl_divergence(p, p) == 0).all()


def test_comparison_by_hand() -> None:
    """Agreement counts every row, perplexity only rows that have a next token."""
    comparison = Comparison()
    reference = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]], np.float32))
    engine = np.log(np.array([[0.5, 0.4, 0.1], [0.6, 0.3, 0.1]], np.float32))
    comparison.add(reference, engine, np.array([1, -1]))
    assert comparison.num_tokens == 2
    assert comparison.top1_agreement == 0.5
    assert comparison.reference_perplexity == pytest.approx(1 / 0.2, rel=1e-5)
    assert comparison.perplexity == pytest.approx(1 / 0.4, rel=1e-5)
    assert comparison.max_kl == pytest.approx(0.1 * np.log(0.1 / 0.6) + 0.8 * np.log(0.8 / 0.3), rel=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_engine_of_nan_fails_every_tolerance(poison: float) -> None:
    """NaN compares false with everything: a naive `mean_kl > tolerance` would let it through."""
    comparison = Comparison()
    logits = np.zeros((2, 3), np.float32)
    comparison.add(logits, np.where(np.arange(3) == 1, poison, logits).astype(np.float32), np.array([0, 1]))
    report = judge(Measured({"prefill": comparison}, 1.0), Tolerance(1e9, 0.0))
    assert not report.parity.verified
    assert np.isfinite(report.parity.mean_kl)


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), [(8, 64), (8, 8), (2, 64), (1, 1)])
def test_replay_gives_every_token_its_own_context(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Chunked, interleaved and over scattered blocks, an exact engine is exact at every position."""
    case = toy_case()
    limits = Limits(128, BLOCK_SIZE, max_num_seqs, max_num_batched_tokens)
    engine = ToyEngine(ToyModel(), case.num_blocks(BLOCK_SIZE))
    measured = run(case, engine, limits)
    assert list(measured.comparisons) == ["prefill", "decode"]
    for comparison in measured.comparisons.values():
        assert comparison.num_tokens == sum(map(len, case.passages))
        assert comparison.max_kl < 1e-9
        assert comparison.top1_agreement == 1.0
        assert comparison.perplexity == pytest.approx(comparison.reference_perplexity)
    assert measured.greedy_match == 1.0
    assert all(len(step.kv_lens) <= max_num_seqs for step in engine.steps)
    forced = replay(make_tracks(case.passages, BLOCK_SIZE), limits)
    assert all(len(step.input_ids) <= max_num_batched_tokens for step, _ in forced)


def test_replay_mixes_prefill_and_decode() -> None:
    """Parity is measured where serving lives: chunks and single tokens in one step, chunk borders inside blocks."""
    case = toy_case()
    tracks = make_tracks(case.passages, BLOCK_SIZE)
    steps = [tensors for tensors, _ in replay(tracks, LIMITS)]
    lengths = [np.diff(step.cu_query_lens) for step in steps]
    assert any(step.min() == 1 and step.max() > 1 for step in lengths)
    starts = np.concatenate([step.kv_lens - length for step, length in zip(steps, lengths, strict=True)])
    assert (starts % BLOCK_SIZE != 0).any()


def test_decode_replay_feeds_one_token_at_a_time() -> None:
    """Steps of few rows run other kernels than chunks: an engine wrong only there would pass a gate over chunks."""
    case = toy_case()
    few = Limits(128, BLOCK_SIZE, DECODE_ROWS, 64)
    steps = [tensors for tensors, _ in replay(make_tracks(case.passages, BLOCK_SIZE), few, DECODE)]
    assert max(len(step.input_ids) for step in steps) == DECODE_ROWS
    assert all((np.diff(step.cu_query_lens) == 1).all() for step in steps)
    assert sum(len(step.input_ids) for step in steps) == sum(map(len, case.passages))


@pytest.mark.parametrize("wrong_when_small", [True, False])
def test_the_worse_kind_of_step_counts(wrong_when_small: bool) -> None:
    """Figures of the better kernels would be a promise that the others do not keep."""
    case = toy_case()

    class OneKindIsWrong(ToyEngine):
        def step(self, tensors: StepTensors) -> NDArray[np.float32]:
            logits = super().step(tensors)
            small = len(tensors.input_ids) <= DECODE_ROWS
            return -logits if small == wrong_when_small else logits

    measured = run(case, OneKindIsWrong(ToyModel(), case.num_blocks(BLOCK_SIZE)))
    parity = judge(measured, Tolerance(0.001, 0.99)).parity
    bad, good = ("decode", "prefill") if wrong_when_small else ("prefill", "decode")
    assert not parity.verified
    assert parity.mean_kl == parity.by_step[bad].mean_kl > 10 * parity.by_step[good].mean_kl
    assert parity.top1_agreement == parity.by_step[bad].top1_agreement


def test_tracks_share_no_block_and_are_scattered() -> None:
    """Blocks in order would hide a kernel that ignores the block table."""
    sequences = [range(30), range(13)]
    tracks = make_tracks([list(s) for s in sequences], BLOCK_SIZE, reserve=3)
    dealt = [block for track in tracks for block in track.blocks]
    assert sorted(dealt) == list(range(blocks_needed([list(s) for s in sequences], BLOCK_SIZE, reserve=3)))
    assert dealt != sorted(dealt)


def test_greedy_match_stops_at_the_first_difference() -> None:
    """After a difference the two texts are different texts: later coincidences are no matches."""
    case = toy_case()
    model = ToyModel()

    class Wandering(ToyEngine):
        def step(self, tensors: StepTensors) -> NDArray[np.float32]:
            logits = super().step(tensors)
            wrong = tensors.kv_lens == 8
            if len(logits) == len(wrong):
                logits[wrong] = np.roll(logits[wrong], 1, axis=-1)
            return logits

    only_prompts = VerifyCase(passages=((1, 2, 3),), prompts=case.prompts[:1], greedy_tokens=12)
    measured = run(only_prompts, Wandering(model, only_prompts.num_blocks(BLOCK_SIZE)))
    assert measured.greedy_match == pytest.approx(3 / 12)


def test_gate_refuses_what_is_over_either_tolerance() -> None:
    """A low mean divergence does not excuse other first choices, nor the other way round."""
    case = toy_case()
    exact = run(case, ToyEngine(ToyModel(), case.num_blocks(BLOCK_SIZE)))
    sharp = run(case, ToyEngine(ToyModel(), case.num_blocks(BLOCK_SIZE), scale=8.0))
    assert judge(exact, Tolerance(0.001, 0.99)).parity.verified
    report = judge(sharp, Tolerance(0.001, 0.99))
    assert report.parity.top1_agreement == 1.0
    assert not report.parity.verified
    with pytest.raises(BuildError, match=r"mean KL .*at most 0\.001.*--allow-unverified"):
        require_verified(report.parity, "int8", "int8")
    assert not judge(run(case, _swapped(case)), Tolerance(1e9, 0.99)).parity.verified


def _swapped(case: VerifyCase) -> ToyEngine:
    """An engine of other weights, compared with the first model."""
    engine = ToyEngine(ToyModel(seed=7), case.num_blocks(BLOCK_SIZE))
    other = engine.model
    engine.model = ToyModel()
    engine.model.context_logits = other.context_logits  # type: ignore[method-assign]
    right = ToyModel()
    engine.model.reference = right.reference  # type: ignore[method-assign]
    return engine


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def test_shipped_text_is_long_enough() -> None:
    """A gate over a few tokens passes by luck: bytes or words, there are at least 500."""
    assert sum(map(len, shipped_case(bytes_of, 256, 8192).passages)) >= 500
    words = shipped_case(lambda text: [len(word) for word in text.split()], 256, 8192)
    assert sum(map(len, words.passages)) >= 500
    assert len(words.prompts) == 8


@pytest.mark.parametrize("max_model_len", [2, 16, 64])
def test_shipped_text_fits_short_models(max_model_len: int) -> None:
    """A model of few positions is verified within them, greedy tokens included."""
    case = shipped_case(bytes_of, 256, max_model_len)
    assert max(map(len, case.passages)) <= max_model_len
    assert max(map(len, case.prompts)) + case.greedy_tokens <= max_model_len
    assert min(map(len, case.prompts)) >= 1


def test_tokenizer_that_knows_no_english() -> None:
    """A gate over nothing must not pass."""
    with pytest.raises(BuildError, match="no token"):
        shipped_case(lambda text: [], 256, 8192)


def test_tokenizer_of_another_model_is_refused() -> None:
    """Ids past the embedding read whatever lies behind it."""
    with pytest.raises(BuildError, match=r"tokenizer gives token id 121, but the model has only 100"):
        shipped_case(bytes_of, 100, 8192)
