"""The sampler as the engine core sees it. Implemented in castline.runtime.sampler."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from castline.engines.errors import EngineError, ErrorCode
from castline.runtime.events import TokenLogprobs
from castline.runtime.sampling_params import SamplingParams

UNSOUND_LOGITS: Final = "the step gave NaN or infinite logits"
"""Why a row that no option touches has no token."""


class SampleResult(msgspec.Struct, frozen=True):
    token_ids: list[int]
    """One a row."""
    logprobs: list[TokenLogprobs | None]
    """One a row, None where its request did not ask; empty where none did."""


class BrokenLogits(EngineError):
    """Some rows have no token to choose; nothing was recorded for any row."""

    def __init__(self, reasons: Mapping[int, str], code: ErrorCode = ErrorCode.ENGINE_FAILED) -> None:
        """*code* says whose fault it is: the engine's, or that of a request whose options forbid every token."""
        super().__init__("; ".join(f"sequence {key}: {reason}" for key, reason in reasons.items()))
        self.reasons = dict(reasons)
        self.code = code


class Sampler(Protocol):
    """Keeps what it needs of a sequence (penalty counts, random state) by key, from `add` to `remove`."""

    def add(self, seq_key: int, params: SamplingParams, prompt_token_ids: Sequence[int], index: int) -> None: ...

    def remove(self, seq_key: int) -> None: ...

    def sample(
        self, logits: NDArray[np.float32], seq_keys: Sequence[int], maxima: NDArray[np.float32] | None = None
    ) -> SampleResult:
        """One token a row of logits [R, V], recorded as generated. If it raises, nothing is recorded.

        *maxima* are the rows' `castline.plugins.contract.LOGITS_MAXIMA`, where the executor gives them.
        """
        ...

    def wants_logits(self, seq_keys: Sequence[int], ahead: int = 0) -> list[int]:
        """Places in *seq_keys*, ascending, of the sequences whose token cannot be chosen by `choices` alone.

        The token is the next one, or *ahead* tokens after it. An option that edits or reports logits stays as long as
        its sequence, or ends with a number of tokens: a sequence that wants no logits never wants any again.
        """
        ...

    def choices(self, seq_keys: Sequence[int], ahead: int = 0) -> NDArray[Any]:
        """[R] of `castline.plugins.cpu.sampling.CHOICE`, with rows 0 .. R: what `sample` would choose that token by.

        Records nothing. Valid until the next call.
        """
        ...

    def record(self, seq_keys: Sequence[int], token_ids: Sequence[int]) -> None:
        """Their next tokens, which were chosen elsewhere by their `choices`."""
        ...

    def prompt_logprobs(
        self, logits: NDArray[np.float32], next_token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        """For each row of logits: the log-probability of the token that follows, and the *num_top* most likely."""
        ...
