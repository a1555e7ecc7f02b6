"""Checks a request once, at the edge; everything behind it trusts what it is given.

Every refusal is a RequestError that names the field, the value and what is allowed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from castline.engines.errors import ErrorCode, RequestError
from castline.runtime.client import EffectiveLimits
from castline.runtime.sampling_params import SamplingParams

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Logits stay finite between them."""
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
"""Each of a request's prompts keeps them while it waits."""
INT64 = (-(1 << 63), (1 << 63) - 1)


def validate_prompt(prompt_token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The prompt as the engine takes it: at least one token, each in the model's vocabulary."""
    if not prompt_token_ids:
        raise RequestError("the prompt is empty: it holds no token; send some text or token ids", field="prompt")
    if {*map(type, prompt_token_ids)} == {int} and min(prompt_token_ids) >= 0 and max(prompt_token_ids) < vocab_size:
        return tuple(prompt_token_ids)  # no name is made for each of thousands
    return tuple(_integer(f"prompt[{place}]", token, 0, vocab_size - 1) for place, token in enumerate(prompt_token_ids))


def validate_params(
    params: SamplingParams, vocab_size: int, limits: EffectiveLimits, prompt_len: int
) -> SamplingParams:
    """*params* with every value in range and normal form, and ``max_tokens`` a number that fits max_model_len.

    A max_tokens that reaches past max_model_len is cut down to it, as None is: the text then ends with `length`.
    """
    max_tokens = _resolve_max_tokens(params.max_tokens, limits.max_model_len, prompt_len)
    top_k = _integer("top_k", params.top_k, -1, INT64[1])
    return replace(
        params,
        n=_integer("n", params.n, 1, MAX_N),
        max_tokens=max_tokens,
        min_tokens=_min_tokens(params.min_tokens, max_tokens),
        temperature=_number("temperature", params.temperature, 0, MAX_TEMPERATURE),
        top_k=top_k if 0 < top_k < vocab_size else 0,
        top_p=_number("top_p", params.top_p, 0, 1, above=True),
        min_p=_number("min_p", params.min_p, 0, 1),
        repetition_penalty=_number(
            "repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        ),
        presence_penalty=_number("presence_penalty", params.presence_penalty, -2, 2),
        frequency_penalty=_number("frequency_penalty", params.frequency_penalty, -2, 2),
        logit_bias=_logit_bias(params.logit_bias, vocab_size),
        seed=None if params.seed is None else _integer("seed", params.seed, *INT64),
        stop=_stop_strings(params.stop),
        stop_token_ids=_stop_token_ids(params.stop_token_ids, vocab_size),
        logprobs=_optional_count("logprobs", params.logprobs),
        prompt_logprobs=_optional_count("prompt_logprobs", params.prompt_logprobs),
    )


def validate_salt(cache_salt: Any) -> str | None:
    """Any text; the empty one is a salt too."""
    if cache_salt is None:
        return None
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt must be a string, not {cache_salt!r}", field="cache_salt")
    _check_unicode("cache_salt", cache_salt)
    return cache_salt


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name}: character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}, which no text may "
            "hold; send the full pair or none",
            field=name,
        ) from None


def _resolve_max_tokens(max_tokens: int | None, max_model_len: int, prompt_len: int) -> int:
    """At least one token is generated, unless none is asked for."""
    if prompt_len == 0:
        raise RequestError("the prompt is empty: it holds no token; send some text or token ids", field="prompt")
    wanted = None if max_tokens is None else _integer("max_tokens", max_tokens, 0, INT64[1])
    room = max_model_len - prompt_len
    if room < (0 if wanted == 0 else 1):
        raise RequestError(
            f"the prompt has {prompt_len} tokens, but this engine holds {max_model_len} tokens of prompt and text "
            f"together: shorten the prompt to {max_model_len - 1} tokens or fewer",
            field="prompt",
            code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        )
    return room if wanted is None else min(wanted, room)


def _min_tokens(value: Any, max_tokens: int) -> int:
    count = _integer("min_tokens", value, 0, INT64[1])
    if count > max_tokens:
        raise RequestError(
            f"min_tokens is {count}, but at most {max_tokens} tokens can be generated (max_tokens, and what the prompt "
            "leaves of the context)",
            field="min_tokens",
        )
    return count


def _logit_bias(bias: Any, vocab_size: int) -> dict[int, float]:
    """Keys may be the strings that JSON makes of them."""
    if not isinstance(bias, Mapping):
        raise RequestError("logit_bias must map token ids to numbers", field="logit_bias")
    if len(bias) > MAX_BIASED_TOKENS:
        raise RequestError(
            f"logit_bias has {len(bias)} entries; at most {MAX_BIASED_TOKENS} are allowed", field="logit_bias"
        )
    checked = {}
    for key, value in bias.items():
        name = f"logit_bias[{key}]"
        token = _token_id_key(key)
        if token is None or not 0 <= token < vocab_size:
            raise RequestError(f"{name}: {key!r} is not a token id; this model's are 0 to {vocab_size - 1}", field=name)
        checked[token] = _number(name, value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return checked


def _token_id_key(key: Any) -> int | None:
    if isinstance(key, str) and key.isascii() and key.removeprefix("-").isdigit():
        return int(key) if len(key) < 20 else None
    return key if isinstance(key, int) and not isinstance(key, bool) else None


def _stop_strings(stop: Any) -> tuple[str, ...]:
    """One string stands for a list of one."""
    strings = (stop,) if isinstance(stop, str) else stop
    _list_of_at_most("stop", strings, MAX_STOP_STRINGS)
    for place, string in enumerate(strings):
        name = f"stop[{place}]"
        if not isinstance(string, str):
            raise RequestError(f"{name} must be a string, not {string!r}", field=name)
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            raise RequestError(f"{name} must have 1 to {MAX_STOP_CHARACTERS} characters, not {len(string)}", field=name)
        _check_unicode(name, string)
    return tuple(dict.fromkeys(strings))


def _stop_token_ids(ids: Any, vocab_size: int) -> tuple[int, ...]:
    _list_of_at_most("stop_token_ids", ids, MAX_STOP_TOKEN_IDS)
    return tuple(_integer(f"stop_token_ids[{place}]", token, 0, vocab_size - 1) for place, token in enumerate(ids))


def _list_of_at_most(name: str, value: Any, limit: int) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RequestError(f"{name} must be a list, not {value!r}", field=name)
    if len(value) > limit:
        raise RequestError(f"{name} has {len(value)} entries; at most {limit} are allowed", field=name)


def _optional_count(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value, 0, MAX_LOGPROBS)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} must be an integer, not {value!r}", field=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be from {low} to {high}, not {value}", field=name)
    return value


def _number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    """A finite number from *low* (or above it) to *high*."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError(f"{name} must be a number, not {value!r}", field=name)
    if not math.isfinite(value) or not low <= value <= high or (above and value == low):
        bounds = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} must be {bounds}, not {value}", field=name)
    return float(value)
