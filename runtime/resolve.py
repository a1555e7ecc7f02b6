"""A request's options made definite at the edge, for every front door alike."""

from dataclasses import replace

from castline.runtime.admission import length_limit, validate_fits
from castline.runtime.client import EffectiveLimits
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.validation import validate_params


def resolve_params(params: SamplingParams, prompt_len: int, vocab_size: int, limits: EffectiveLimits) -> SamplingParams:
    """*params* with every value checked and max_tokens a number that model length and KV pool can hold.

    Raises RequestError. An unset max_tokens is what fits; one that was asked for and can never fit is refused.
    """
    checked = validate_params(params, vocab_size, limits, prompt_len)
    validate_fits(prompt_len, params, limits)
    max_tokens = length_limit(prompt_len, params, limits) - prompt_len
    return checked if max_tokens == checked.max_tokens else replace(checked, max_tokens=max_tokens)
