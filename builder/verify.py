"""Parity of an engine with the transformers model in fp32: the gate before a bundle is called verified.

The engine reads the shipped text through its paged pool (chunked, interleaved, scattered blocks) with its own tokens
forced, once in steps of many tokens and once in steps of few, which run different kernels; the reference reads each
passage in one pass with its ordinary attention. Both see the same context at every position, so the divergence is what
the recipe and the kernels cost, and nothing else.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from castline.builder.parity import Comparison
from castline.builder.recipes import Tolerance
from castline.builder.replay import DECODE, Rows, Track, blocks_needed, make_tracks, replay, step_of
from castline.engines.errors import BuildError
from castline.engines.manifest import Limits, Parity, StepParity
from castline.plugins.contract import StepTensors

PASSAGE_SEPARATOR = "\n%%\n"
MAX_PASSAGE_TOKENS = 400
"""Of a passage; keeps tokenizers of bytes from making the text five times as long."""
GREEDY_TOKENS = 32
DECODE_ROWS = 4
"""Sequences of a decode step: few enough for the kernels that serve a single user."""
PREFILL, DECODING = "prefill", "decode"


class Engine(Protocol):
    """One engine with its KV pool."""

    def step(self, tensors: StepTensors) -> NDArray[np.float32]:
        """One forward pass; logits [R, vocabulary]."""
        ...


Reference = Callable[[Sequence[int]], NDArray[np.float32]]
"""Token ids of one sequence → logits [tokens, vocabulary], in fp32 with the model's ordinary attention."""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class VerifyCase:
    """What is run: passages teacher-forced, prompts continued greedily. Token ids."""

    passages: tuple[tuple[int, ...], ...]
    prompts: tuple[tuple[int, ...], ...]
    greedy_tokens: int = GREEDY_TOKENS

    def num_blocks(self, block_size: int) -> int:
        """Blocks that the larger of the two runs needs."""
        prompts = blocks_needed(self.prompts, block_size, reserve=self.greedy_tokens)
        return max(blocks_needed(self.passages, block_size), prompts)


@dataclass(frozen=True, slots=True)
class Measured:
    """A comparison for each kind of step, and the share of greedy tokens that match."""

    comparisons: Mapping[str, Comparison]
    greedy_match: float


@dataclass(frozen=True, slots=True)
class ParityReport:
    """The figures of the manifest, and the divergence of each position for the report's plot."""

    parity: Parity
    kl: tuple[float, ...]


def shipped_case(encode: Encode, vocab_size: int, max_model_len: int) -> VerifyCase:
    """The package's text and prompts as token ids. Raises BuildError where the tokenizer has ids the model has not."""
    data = files("castline.builder") / "data"
    passages = data.joinpath("verify.txt").read_text(encoding="utf-8").split(PASSAGE_SEPARATOR)
    prompts = data.joinpath("prompts.txt").read_text(encoding="utf-8").splitlines()
    encoded = [encode(passage.strip("\n"))[:MAX_PASSAGE_TOKENS] for passage in passages]
    greedy_tokens = min(GREEDY_TOKENS, max(1, max_model_len // 2))
    begun = (tuple(encode(prompt)[: max_model_len - greedy_tokens]) for prompt in prompts)
    case = VerifyCase(
        passages=tuple(piece for tokens in encoded for piece in _pieces(tokens, max_model_len)),
        prompts=tuple(tokens for tokens in begun if tokens),
        greedy_tokens=greedy_tokens,
    )
    if not case.passages or not case.prompts:
        raise BuildError("verify: the tokenizer turns English text into no token; build with --no-verify, or mend it")
    highest = max(max(tokens) for tokens in (*case.passages, *case.prompts))
    if highest >= vocab_size:
        raise BuildError(
            f"verify: the tokenizer gives token id {highest}, but the model has only {vocab_size} embeddings; "
            "the checkpoint's tokenizer and weights do not belong together"
        )
    return case


def measure(
    case: VerifyCase,
    engine: Engine,
    reference: Reference,
    limits: Limits,
    advance: Callable[[], None] = lambda: None,
) -> Measured:
    """Compares over the passages, in steps of either kind, and over the prompts; *advance* after each sequence."""
    expected = []
    for passage in case.passages:
        expected.append(reference(passage))
        advance()
    few_rows = replace(limits, max_num_seqs=min(DECODE_ROWS, limits.max_num_seqs))
    prefill = _compare(case, engine, expected, replay(make_tracks(case.passages, limits.block_size), limits))
    decode = _compare(case, engine, expected, replay(make_tracks(case.passages, limits.block_size), few_rows, DECODE))
    del expected
    return Measured({PREFILL: prefill, DECODING: decode}, _greedy_match(case, engine, reference, limits, advance))


def _compare(
    case: VerifyCase,
    engine: Engine,
    expected: Sequence[NDArray[np.float32]],
    steps: Iterable[tuple[StepTensors, Sequence[Rows]]],
) -> Comparison:
    comparison = Comparison()
    for tensors, rows in steps:
        logits = engine.step(tensors)
        first = 0
        for row in rows:
            size = row.stop - row.start
            targets = _targets(case.passages[row.sequence], row)
            comparison.add(expected[row.sequence][row.start : row.stop], logits[first : first + size], targets)
            first += size
    return comparison


def judge(measured: Measured, tolerance: Tolerance) -> ParityReport:
    """The figures of the worse kind of step against the recipe's tolerance; ``verified`` only where both are held."""

    def within(comparison: Comparison) -> bool:
        return comparison.mean_kl <= tolerance.mean_kl and comparison.top1_agreement >= tolerance.top1

    worse = max(measured.comparisons.values(), key=lambda comparison: (not within(comparison), comparison.mean_kl))
    parity = Parity(
        verified=within(worse),
        num_tokens=worse.num_tokens,
        mean_kl=_finite(worse.mean_kl),
        max_kl=_finite(worse.max_kl),
        top1_agreement=worse.top1_agreement,
        perplexity=_finite(worse.perplexity),
        reference_perplexity=_finite(worse.reference_perplexity),
        tolerance_mean_kl=tolerance.mean_kl,
        tolerance_top1=tolerance.top1,
        greedy_match=measured.greedy_match,
        by_step={kind: _step_parity(comparison) for kind, comparison in measured.comparisons.items()},
    )
    return ParityReport(parity, tuple(map(_finite, worse.kl)))


def _step_parity(comparison: Comparison) -> StepParity:
    return StepParity(
        mean_kl=_finite(comparison.mean_kl),
        max_kl=_finite(comparison.max_kl),
        top1_agreement=comparison.top1_agreement,
        perplexity=_finite(comparison.perplexity),
    )


def require_verified(parity: Parity, recipe: str, kv_dtype: str) -> None:
    """Raises BuildError with the figures and the cure where the engine is over its tolerance."""
    if parity.verified:
        return
    raise BuildError(
        f"verify: the engine is too far from the transformers model in fp32 for recipe {recipe} with {kv_dtype} KV "
        f"blocks: mean KL {parity.mean_kl:.3g} (at most {parity.tolerance_mean_kl:g}), top-1 agreement "
        f"{parity.top1_agreement:.1%} (at least {parity.tolerance_top1:.0%}), perplexity {parity.perplexity:.2f} "
        f"(reference {parity.reference_perplexity:.2f}) over {parity.num_tokens} tokens. Take a more precise --recipe "
        "or --kv-dtype, or write the bundle all the same, marked unverified, with --allow-unverified"
    )


def _pieces(tokens: Sequence[int], length: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + length]) for start in range(0, len(tokens), length)]


def _targets(tokens: Sequence[int], row: Rows) -> NDArray[np.int64]:
    following = tokens[row.start + 1 : row.stop + 1]
    return np.array([*following, *[-1] * (row.stop - row.start - len(following))], np.int64)


def _greedy_match(
    case: VerifyCase,
    engine: Engine,
    reference: Reference,
    limits: Limits,
    advance: Callable[[], None],
) -> float:
    """Share of the engine's greedy tokens that the reference would have chosen too, up to each first difference.

    Up to there both have continued the same text, so that one pass of the reference over the engine's own continuation
    tells what it would have said; tokens after the first difference count as different.
    """
    matched = 0
    for start in range(0, len(case.prompts), limits.max_num_seqs):
        group = case.prompts[start : start + limits.max_num_seqs]
        tracks = make_tracks(group, limits.block_size, reserve=case.greedy_tokens)
        _continue_greedily(tracks, engine, limits.block_size, case.greedy_tokens)
        for track, prompt in zip(tracks, group, strict=True):
            wanted = reference(track.tokens[:-1])[len(prompt) - 1 :].argmax(axis=-1)
            equal = wanted == np.array(track.tokens[len(prompt) :])
            matched += case.greedy_tokens if equal.all() else int(equal.argmin())
            advance()
    return matched / (len(case.prompts) * case.greedy_tokens)


def _continue_greedily(tracks: Sequence[Track], engine: Engine, block_size: int, count: int) -> None:
    """Appends *count* greedy tokens to every track: its prompt in a step of its own, then all decode together."""
    for index, track in enumerate(tracks):
        rows = [Rows(index, 0, len(track.tokens))]
        track.tokens.append(int(engine.step(step_of(tracks, rows, block_size, last_only=True))[0].argmax()))
    for _ in range(count - 1):
        rows = [Rows(index, len(track.tokens) - 1, len(track.tokens)) for index, track in enumerate(tracks)]
        logits = engine.step(step_of(tracks, rows, block_size, last_only=True))
        for track, token in zip(tracks, logits.argmax(axis=-1).tolist(), strict=True):
            track.tokens.append(token)


def _finite(value: float) -> float:
    """JSON has no infinity: a distance without bound is written as the largest number."""
    return value if np.isfinite(value) else float(np.finfo(np.float64).max)
