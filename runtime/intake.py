"""What a caller asks, made a request that the engine can trust: prompt encoded, values checked, length decided."""

import asyncio
import itertools
from collections.abc import Callable, Sequence

from castline.engines.errors import CastlineError
from castline.runtime.client import EffectiveLimits
from castline.runtime.encoding import LONG_CHARS, begin_encoding
from castline.runtime.request import Request
from castline.runtime.resolve import resolve_params
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.tokenizer import Tokenizer
from castline.runtime.validation import validate_prompt, validate_salt


class Intake:
    """For one engine. *clock* is the engine loop's: arrival times cross on it."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, limits: EffectiveLimits, clock: Callable[[], float]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = limits
        self._clock = clock
        self._ids = itertools.count()
        self._encoding: set[asyncio.Future[list[int]]] = set()
        """Long prompts, each with a task that waits for it."""

    async def encode(self, prompt: str | Sequence[int], add_special_tokens: bool) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if len(prompt) <= LONG_CHARS:
            return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        encoding = begin_encoding(
            self._tokenizer, prompt, add_special_tokens=add_special_tokens, max_tokens=self._limits.max_model_len
        )
        self._encoding.add(encoding)
        try:
            return await encoding
        finally:
            self._encoding.discard(encoding)

    def refuse(self, why: Callable[[], CastlineError]) -> None:
        """Ends the wait for every prompt that is being encoded: what comes of it would be refused."""
        for encoding in self._encoding:
            if not encoding.done():
                encoding.set_exception(why())

    def request(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        deadline: float | None,
        cache_salt: str | None,
        streams: bool,
    ) -> Request:
        """Under an id of its own, for callers' ids repeat. Raises RequestError."""
        resolved = resolve_params(params, len(token_ids), self._vocab_size, self._limits)  # first: it bounds the prompt
        return Request(
            request_id=f"{request_id}#{next(self._ids)}",
            prompt_token_ids=validate_prompt(token_ids, self._vocab_size),
            params=resolved,
            arrival_time=self._clock(),
            deadline=deadline,
            cache_salt=validate_salt(cache_salt),
            streams=streams,
        )
