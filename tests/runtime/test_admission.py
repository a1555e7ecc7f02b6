"""Which requests are refused at once, and at what length the others end."""

import pytest

from castline.engines.errors import ErrorCode, RequestError
from castline.runtime.admission import length_limit, validate_fits
from castline.runtime.sampling_params import SamplingParams


def test_a_prompt_larger_than_the_pool_is_refused_with_the_arithmetic(make_limits):
    """C12: a request that can never fit must not wait for ever at the head of the line."""
    limits = make_limits(num_blocks=8, block_size=16, max_model_len=2048)
    with pytest.raises(RequestError, match=r"200 tokens and needs 13 KV blocks.* 8 blocks of 16 tokens") as caught:
        validate_fits(200, SamplingParams(), limits)
    assert (caught.value.field, caught.value.code) == ("prompt", ErrorCode.REQUEST_TOO_LARGE)


def test_max_tokens_larger_than_the_pool_is_refused_with_what_would_fit(make_limits):
    """C12, same shape: the prompt fits, but the text asked for never would."""
    limits = make_limits(num_blocks=8, block_size=16, max_model_len=2048)
    with pytest.raises(RequestError, match=r"max_tokens 100 it needs 13 KV blocks.*at most 29 tokens") as caught:
        validate_fits(100, SamplingParams(max_tokens=100), limits)
    assert caught.value.field == "max_tokens"
    validate_fits(100, SamplingParams(max_tokens=29), limits)
    with pytest.raises(RequestError):
        validate_fits(100, SamplingParams(max_tokens=30), limits)


@pytest.mark.parametrize("prompt_len", [64, 65])
def test_a_prompt_that_leaves_no_room_in_the_model_is_refused_with_the_counts(make_limits, prompt_len):
    """C07: one token must be left for the answer."""
    with pytest.raises(RequestError, match=f"{prompt_len} tokens, and max_model_len is 64.*at most 63") as caught:
        validate_fits(prompt_len, SamplingParams(), make_limits(max_model_len=64))
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_a_prompt_alone_may_fill_the_model(make_limits):
    """C34: max_tokens 0 needs no room for an answer."""
    limits = make_limits(max_model_len=64)
    validate_fits(64, SamplingParams(max_tokens=0), limits)
    assert length_limit(64, SamplingParams(max_tokens=0), limits) == 64
    with pytest.raises(RequestError):
        validate_fits(65, SamplingParams(max_tokens=0), limits)


def test_an_empty_prompt_is_refused(make_limits):
    """C33: nothing to compute means no logits to sample from."""
    with pytest.raises(RequestError, match="empty"):
        validate_fits(0, SamplingParams(), make_limits())


def test_a_prompt_larger_than_a_step_is_admitted(make_limits):
    """C06: the token budget bounds a step, never a prompt."""
    validate_fits(100, SamplingParams(), make_limits(max_num_batched_tokens=8))


@pytest.mark.parametrize(
    ("max_tokens", "num_blocks", "expected"), [(5, 64, 15), (500, 64, 128), (None, 64, 128), (None, 8, 33)]
)
def test_length_limit(make_limits, max_tokens, num_blocks, expected):
    """C26: without max_tokens the text ends at the model's length, or where the whole pool is full."""
    limits = make_limits(num_blocks=num_blocks, max_model_len=128, block_size=4)
    assert length_limit(10, SamplingParams(max_tokens=max_tokens), limits) == expected
