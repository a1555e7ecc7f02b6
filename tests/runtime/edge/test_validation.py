"""Validation: every value at its limit and one past it, and messages that name the field."""

import math
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castline.engines.errors import ErrorCode, RequestError
from castline.runtime.client import EffectiveLimits
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.validation import MAX_BIASED_TOKENS, validate_params, validate_prompt

VOCAB = 100
LIMITS = EffectiveLimits(
    max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, block_size=16, num_blocks=8, max_concurrency=2.0
)


def validate(prompt_len: int = 10, vocab: int = VOCAB, **values: Any) -> SamplingParams:
    return validate_params(SamplingParams(**values), vocab, LIMITS, prompt_len)


def refused(prompt_len: int = 10, vocab: int = VOCAB, **values: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        validate(prompt_len, vocab, **values)
    return caught.value


def test_defaults_pass_and_resolve() -> None:
    assert validate() == replace(SamplingParams(), max_tokens=54)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", value) for value in (1, 128)),
        *(("temperature", value) for value in (0, 1e-9, 2, 100.0)),
        *(("top_p", value) for value in (1, 1e-9, 0.5)),
        *(("min_p", value) for value in (0, 1)),
        *(("repetition_penalty", value) for value in (0.01, 100)),
        *(("presence_penalty", value) for value in (-2, 2)),
        *(("frequency_penalty", value) for value in (-2.0, 2.0)),
        *(("seed", value) for value in (-(2**63), 2**63 - 1, 0, None)),
        *(("logprobs", value) for value in (0, 20, None)),
        *(("prompt_logprobs", value) for value in (0, 20, None)),
        *(("stop", value) for value in ((), ("a",) * 1, tuple(f"s{n}" for n in range(16)), ("x" * 1024,))),
        *(("stop_token_ids", value) for value in ((), (0, 99))),
        *(("logit_bias", value) for value in ({}, {0: -100.0, 99: 100.0})),
        *(("min_tokens", value) for value in (0, 54)),
        *(("max_tokens", value) for value in (0, 1, 54)),
    ],
)
def test_values_within_the_limits_are_kept(field: str, value: Any) -> None:
    """A limit that is off by one refuses what the documentation allows."""
    assert getattr(validate(**{field: value}), field) == (54 if field == "max_tokens" and value is None else value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", value) for value in (0, -1, 129, 1.0, "1", None, True)),
        *(("temperature", value) for value in (-0.1, 100.1, math.nan, math.inf, "hot", None, True)),
        *(("top_p", value) for value in (0, -0.1, 1.0001, math.nan, None)),
        *(("min_p", value) for value in (-0.1, 1.1, math.nan)),
        *(("top_k", value) for value in (-2, 1.5, "5", 2**63)),
        *(("repetition_penalty", value) for value in (0, -1, 1e-300, 100.5, math.inf)),
        *(("presence_penalty", value) for value in (-2.1, 2.1, math.nan)),
        *(("frequency_penalty", value) for value in (-2.1, 2.1, "x")),
        *(("seed", value) for value in (2**63, -(2**63) - 1, 1.5, "1", True)),
        *(("logprobs", value) for value in (-1, 21, True, 1.0)),
        *(("prompt_logprobs", value) for value in (-1, 21)),
        *(("stop", value) for value in (5, {"a": 1}, tuple(f"s{n}" for n in range(17)))),
        *(("stop_token_ids", value) for value in (5, "ab", tuple(range(65)))),
        *(("logit_bias", value) for value in ([1], None)),
        *(("min_tokens", value) for value in (-1, 55, 1.0)),
        *(("max_tokens", value) for value in (-1, 1.5, "4", True)),
    ],
)
def test_values_outside_are_refused_by_name(field: str, value: Any) -> None:
    """Types included: JSON, gRPC and Python callers all end here."""
    error = refused(**{field: value})
    assert (error.field, error.code) == (field, ErrorCode.INVALID_VALUE)
    assert error.message.startswith(field)


@pytest.mark.parametrize(
    ("bias", "key"),
    [
        ({VOCAB: 1}, "100"),
        ({-1: 1}, "-1"),
        ({"abc": 1}, "abc"),
        ({"1.5": 1}, "1.5"),
        ({True: 1}, "True"),
        ({5: 101}, "5"),
        ({5: -100.5}, "5"),
        ({5: math.nan}, "5"),
        ({5: "x"}, "5"),
        ({"9" * 5000: 1}, "9" * 5000),
        ({"²": 1}, "²"),
    ],
)
def test_bad_logit_bias_names_the_key(bias: Any, key: str) -> None:
    """C30: 400 naming the key, never an index error in the middle of a batch."""
    error = refused(logit_bias={3: 1.0, **bias})
    assert error.field == f"logit_bias[{key}]"
    assert error.message.startswith(f"logit_bias[{key}]")


def test_logit_bias_has_a_limit_of_entries() -> None:
    """Prevents a small body from taking gigabytes: thousands of prompts, each with a bias for the whole vocabulary."""
    bias = dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 1.0)
    error = refused(vocab=5000, logit_bias=bias)
    assert error.field == "logit_bias"
    assert f"at most {MAX_BIASED_TOKENS}" in error.message
    bias.popitem()
    assert validate(vocab=5000, logit_bias=bias).logit_bias == bias


def test_logit_bias_keys_of_json_become_numbers() -> None:
    assert validate(logit_bias={"7": 1, 8: 2}).logit_bias == {7: 1.0, 8: 2.0}


@pytest.mark.parametrize(
    ("value", "field"), [(("",), "stop[0]"), (("a", 5), "stop[1]"), (("a", "x" * 1025), "stop[1]")]
)
def test_bad_stop_strings_are_named(value: Any, field: str) -> None:
    """An empty stop string would end every text before it begins."""
    assert refused(stop=value).field == field


@pytest.mark.parametrize("bad", [-1, VOCAB, 1.0, "x"])
def test_bad_stop_token_ids_are_named(bad: Any) -> None:
    assert refused(stop_token_ids=(1, bad)).field == "stop_token_ids[1]"


def test_forms_that_mean_the_same_become_one() -> None:
    """One string for a list of one (iterating it would stop at each letter); top-k that keeps everything is off."""
    assert validate(stop="END").stop == ("END",)
    assert validate(stop=["a", "b", "a"]).stop == ("a", "b")
    assert [validate(top_k=k).top_k for k in (-1, 0, 5, VOCAB - 1, VOCAB, 10**6)] == [0, 0, 5, VOCAB - 1, 0, 0]


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(1, 63), (63, 1)])
def test_no_max_tokens_means_the_rest_of_the_context(prompt_len: int, max_tokens: int) -> None:
    """C07 and C26: a prompt of 63 gives exactly one token at max_model_len 64."""
    assert validate(prompt_len).max_tokens == max_tokens
    assert validate(prompt_len, max_tokens=1000).max_tokens == max_tokens


@pytest.mark.parametrize("prompt_len", [64, 65, 1000])
def test_prompts_that_leave_no_room_are_refused_with_the_counts(prompt_len: int) -> None:
    """C07."""
    error = refused(prompt_len)
    assert (error.code, error.field) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt")
    assert f"{prompt_len} tokens" in error.message
    assert "64" in error.message


def test_a_prompt_that_is_only_scored_may_fill_the_context() -> None:
    """C34: max_tokens 0 generates nothing, so it needs no room."""
    assert validate(64, max_tokens=0).max_tokens == 0
    assert refused(65, max_tokens=0).code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_min_tokens_must_fit_what_can_be_generated() -> None:
    error = refused(60, min_tokens=5)
    assert error.field == "min_tokens"
    assert "4 tokens" in error.message
    assert refused(min_tokens=3, max_tokens=2).field == "min_tokens"


def test_an_empty_prompt_is_refused() -> None:
    """C33."""
    assert refused(0).field == "prompt"
    with pytest.raises(RequestError, match="empty") as caught:
        validate_prompt([], VOCAB)
    assert caught.value.field == "prompt"


def test_prompt_ids_must_be_in_the_vocabulary() -> None:
    """An id past the embedding reads foreign memory in a native kernel."""
    assert validate_prompt([0, 99], VOCAB) == (0, 99)
    for bad in (-1, 100, "a", 1.0, True):
        with pytest.raises(RequestError) as caught:
            validate_prompt([5, bad], VOCAB)  # type: ignore[list-item]
        assert caught.value.field == "prompt[1]"


@given(st.lists(st.integers(-1, VOCAB) | st.booleans() | st.floats(0, 9), min_size=1, max_size=6))
def test_a_prompt_checked_at_once_is_checked_as_one_by_one(ids: list[Any]) -> None:
    """The quick look at a whole prompt must not pass what the look at every id refuses, nor the other way round."""
    bad = [place for place, token in enumerate(ids) if type(token) is not int or not 0 <= token < VOCAB]
    if not bad:
        assert validate_prompt(ids, VOCAB) == tuple(ids)
        return
    with pytest.raises(RequestError) as caught:
        validate_prompt(ids, VOCAB)
    assert caught.value.field == f"prompt[{bad[0]}]"


def test_every_field_is_checked_or_a_flag() -> None:
    """A field added later without a check would reach the engine as the client sent it."""
    junk: Any = object()
    for name in (field.name for field in fields(SamplingParams)):
        if name != "ignore_eos":
            assert refused(**{name: junk}).field == name


def test_errors_survive_processes() -> None:
    """The loop may live in another process: an error that cannot be pickled would hang the request."""
    error = pickle.loads(pickle.dumps(refused(n=0)))
    assert (error.field, error.code, str(error)) == ("n", ErrorCode.INVALID_VALUE, "n must be from 1 to 128, not 0")
