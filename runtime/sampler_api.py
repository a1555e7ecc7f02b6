"""The sampler as the engine core sees it. Implemented in castline.runtime.sampler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from castline.engines.errors import EngineError, ErrorCode
from castline.runtime.events import TokenLogprobs
from castline.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleResult:
    token_ids: NDArray[np.int64]
    """[R]"""
    logprobs: list[TokenLogprobs | None]
    """One a row; None where the request did not ask."""


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

    def prompt_logprobs(
        self, logits: NDArray[np.float32], next_token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        """For each row of logits: the log-probability of the token that follows, and the *num_top* most likely."""
        ...
