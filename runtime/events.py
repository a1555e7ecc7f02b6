"""What the engine core says of a request, a batch of events after every step. Plain data that any transport carries.

For every (request_id, index) there is exactly one event whose ``finish`` is set, and it is the last.
"""

from enum import StrEnum

import msgspec

from castline.engines.errors import ErrorCode


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position, of the distribution before temperature, penalties and truncation."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token of the vocabulary."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), most likely first."""


class Finish(msgspec.Struct, frozen=True):
    reason: FinishReason
    stop_token_id: int | None = None
    """The EOS or stop token that ended the text; it is the last of the token ids, and its text is not shown."""
    error_code: ErrorCode | None = None
    message: str | None = None


class SequenceEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one continuation."""

    request_id: str
    index: int
    """Which of the request's n continuations."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of token_ids, where asked for."""
    finish: Finish | None = None
    cached_tokens: int | None = None
    """Prompt tokens read from the prefix cache; set on the first event."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One for each prompt token (None for the first); set on index 0's first event where asked for."""
    queue_s: float | None = None
    """Seconds from the request's arrival to its first step; set on the first event."""
