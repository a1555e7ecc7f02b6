"""Everything that changes the logits of one sequence before a token is chosen.

Applied in this order, which is also vLLM's: bias, tokens that may not end the text yet, penalties. A forbidden
token has logit -inf, which no later edit can raise.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from castline.runtime.penalties import Penalties
from castline.runtime.sampling_params import SamplingParams

FORBID_BIAS = -100.0
"""A bias this low forbids the token outright."""


class LogitEdits:
    """The edits of one sequence, each of a few tokens."""

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int], eos_token_ids: Sequence[int]) -> None:
        ending = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        biases = [-np.inf if bias <= FORBID_BIAS else bias for bias in params.logit_bias.values()]
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._biases = np.array(biases, dtype=np.float32)
        self._ending_ids = np.array(sorted(ending), dtype=np.int64)
        self._min_tokens = params.min_tokens if ending else 0
        self._penalties = Penalties(params, prompt_token_ids) if Penalties.wanted(params) else None

    @property
    def any(self) -> bool:
        """Whether any token's logits can need an edit."""
        return bool(self._bias_ids.size) or self._min_tokens > 0 or self._penalties is not None

    def active(self, num_generated: int) -> bool:
        """Whether the next token's logits need an edit at all."""
        return bool(self._bias_ids.size) or num_generated < self._min_tokens or self._penalties is not None

    def apply(self, row: NDArray[np.float32], num_generated: int) -> None:
        """Edits the logits [vocabulary] of token number *num_generated* in place."""
        if self._bias_ids.size:
            row[self._bias_ids] += self._biases
        if num_generated < self._min_tokens:
            row[self._ending_ids] = -np.inf
        if self._penalties is not None:
            self._penalties.apply(row)

    def touched(self, num_generated: int) -> NDArray[np.int64]:
        """Token ids, repeated or not, beyond which `apply` changes nothing."""
        parts = [self._bias_ids]
        if num_generated < self._min_tokens:
            parts.append(self._ending_ids)
        if self._penalties is not None:
            parts.append(self._penalties.touched())
        return np.concatenate(parts)

    def append(self, token_id: int) -> None:
        """A token was generated."""
        if self._penalties is not None:
            self._penalties.append(token_id)
