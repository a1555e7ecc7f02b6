"""Logits to tokens, for a whole batch at once.

Every sequence has its own state, so a batch may hold any mix in any order, and preemption loses nothing. One argmax
over the batch serves every row: it is the answer for plain greedy rows, the peak for the others, and it meets any
NaN. Only rows whose options edit logits are copied; nothing is ever sorted over the vocabulary for a row that asks
for no truncation.
"""

import secrets
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from castline.engines.errors import EngineError, ErrorCode
from castline.runtime.draw import Choice, draw, take_rows
from castline.runtime.events import TokenLogprobs
from castline.runtime.logits import LogitEdits
from castline.runtime.logprobs import token_logprobs
from castline.runtime.randomness import UniformStream
from castline.runtime.sampler_api import BrokenLogits, SampleResult
from castline.runtime.sampling_params import SamplingParams


class _Sequence:
    """What the sampler remembers of one sequence."""

    def __init__(self, params: SamplingParams, edits: LogitEdits, uniforms: UniformStream) -> None:
        self.params = params
        self.edits = edits
        self.uniforms = uniforms
        self.num_generated = 0


class Sampler:
    """Not thread-safe: the engine loop owns it. Parameters were validated at the edge."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        entropy: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        """*entropy* gives the seed of each sequence whose request has none."""
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._entropy = entropy
        self._sequences: dict[int, _Sequence] = {}

    def __len__(self) -> int:
        """Sequences it holds state for."""
        return len(self._sequences)

    def add(self, seq_key: int, params: SamplingParams, prompt_token_ids: Sequence[int], index: int) -> None:
        """A new sequence: continuation *index* of its request. Its key must not be in use."""
        assert seq_key not in self._sequences, f"sequence {seq_key} was added before"
        seed = self._entropy() if params.seed is None else params.seed
        edits = LogitEdits(params, prompt_token_ids, self._eos_token_ids)
        self._sequences[seq_key] = _Sequence(params, edits, UniformStream(seed, index))

    def remove(self, seq_key: int) -> None:
        """Forgets a sequence; unknown keys are ignored."""
        self._sequences.pop(seq_key, None)

    def sample(self, logits: NDArray[np.float32], seq_keys: Sequence[int]) -> SampleResult:
        """Chooses and records the next token of each sequence from its row of *logits* [rows, vocabulary].

        The logits are only read. Raises BrokenLogits, having recorded nothing, if any row has no token to choose.
        """
        assert logits.shape == (len(seq_keys), self._vocab_size), (logits.shape, len(seq_keys), self._vocab_size)
        sequences = [self._sequences[key] for key in seq_keys]
        tokens = logits.argmax(axis=1)
        self._check(logits, tokens, seq_keys, "the step gave NaN or infinite logits", ErrorCode.ENGINE_FAILED)

        edited = [row for row, seq in enumerate(sequences) if seq.edits.active(seq.num_generated)]
        drawn = [row for row, seq in enumerate(sequences) if not seq.params.greedy]
        plain = sorted(set(drawn).difference(edited))
        if plain:
            tokens[plain] = _draw(take_rows(logits, plain), tokens[plain], [sequences[row] for row in plain])
        if edited:
            tokens[edited] = self._sample_edited(logits[edited], [seq_keys[row] for row in edited])

        logprobs = _logprobs(logits, tokens, sequences)
        for seq, token in zip(sequences, tokens.tolist(), strict=True):
            seq.edits.append(token)
            seq.num_generated += 1
        return SampleResult(tokens, logprobs)

    def _sample_edited(self, logits: NDArray[np.float32], seq_keys: Sequence[int]) -> NDArray[np.int64]:
        """Tokens of rows whose options change *logits*, which are a copy."""
        sequences = [self._sequences[key] for key in seq_keys]
        for row, seq in zip(logits, sequences, strict=True):
            seq.edits.apply(row, seq.num_generated)
        tokens: NDArray[np.int64] = logits.argmax(axis=1)
        reason = "logit_bias and min_tokens leave no token to choose"
        self._check(logits, tokens, seq_keys, reason, ErrorCode.INVALID_VALUE)
        drawn = [row for row, seq in enumerate(sequences) if not seq.params.greedy]
        if drawn:
            tokens[drawn] = _draw(take_rows(logits, drawn), tokens[drawn], [sequences[row] for row in drawn])
        return tokens

    @staticmethod
    def _check(
        logits: NDArray[np.float32], best: NDArray[np.int64], seq_keys: Sequence[int], reason: str, code: ErrorCode
    ) -> None:
        """argmax stops at a NaN, so a row whose best logit is finite has no NaN and no +inf."""
        broken = np.flatnonzero(~np.isfinite(logits[np.arange(len(logits)), best]))
        if broken.size:
            raise BrokenLogits({seq_keys[row]: reason for row in broken.tolist()}, code)

    def prompt_logprobs(
        self, logits: NDArray[np.float32], next_token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        """One entry a row of *logits* [rows, vocabulary]: how likely the prompt's own next token was.

        Raises EngineError for NaN or infinite logits.
        """
        if not np.isfinite(logits.max(axis=1)).all():
            raise EngineError("the step gave NaN or infinite logits for a prompt token")
        return token_logprobs(logits, next_token_ids, [num_top] * len(next_token_ids))


def _draw(logits: NDArray[np.float32], best: NDArray[np.int64], sequences: Sequence[_Sequence]) -> NDArray[np.int64]:
    params = [seq.params for seq in sequences]
    choice = Choice(
        temperature=np.array([p.temperature for p in params]),
        top_k=np.array([max(p.top_k, 0) for p in params], dtype=np.int64),
        top_p=np.array([p.top_p for p in params]),
        min_p=np.array([p.min_p for p in params]),
        uniform=np.array([seq.uniforms.at(seq.num_generated) for seq in sequences]),
    )
    return draw(logits, logits[np.arange(len(logits)), best], choice)


def _logprobs(
    logits: NDArray[np.float32], tokens: NDArray[np.int64], sequences: Sequence[_Sequence]
) -> list[TokenLogprobs | None]:
    """Of the raw logits, for the rows that asked."""
    result: list[TokenLogprobs | None] = [None] * len(sequences)
    wanted = [row for row, seq in enumerate(sequences) if seq.params.logprobs is not None]
    if wanted:
        num_top = [sequences[row].params.logprobs or 0 for row in wanted]
        entries = token_logprobs(take_rows(logits, wanted), tokens[wanted].tolist(), num_top)
        for row, entry in zip(wanted, entries, strict=True):
            result[row] = entry
    return result
