"""How one request wants its tokens chosen and when it ends.

Validated once, at the edge (castline.runtime.validation), and trusted after.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing by them only loses precision."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Defaults are those of the OpenAI API where it has the field, else neutral."""

    n: int = 1
    """Independent continuations; they share the prompt's blocks."""
    max_tokens: int | None = None
    """None: up to max_model_len. 0: the prompt only (with prompt_logprobs)."""
    min_tokens: int = 0
    """EOS, stop token ids and stop strings do not end the text before this many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 or -1: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Multiplicative, over prompt and generated tokens."""
    presence_penalty: float = 0.0
    """Additive, generated tokens only."""
    frequency_penalty: float = 0.0
    """Additive per occurrence, generated tokens only."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to a value in -100..100, added to its logit; -100 forbids the token outright."""
    seed: int | None = None
    """With a seed, the text is a function of the request alone, never of the batch it ran in."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Disables the model's EOS ids, not stop strings or stop_token_ids."""
    logprobs: int | None = None
    """Alternatives reported for each generated token; 0 reports the sampled token only, None nothing."""
    prompt_logprobs: int | None = None
    """As logprobs, for each prompt token but the first. Disables reading the prefix cache for this request."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE
