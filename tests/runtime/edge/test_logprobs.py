"""Logprobs against log-softmax in double precision and a full sort."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castline.engines.errors import EngineError
from castline.runtime.logprobs import LOGPROB_FLOOR, token_logprobs
from castline.runtime.sampler import Sampler
from castline.runtime.sampling_params import SamplingParams


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([2, 50, 5000]),
    top=st.lists(st.integers(0, 20), min_size=1, max_size=7),
    ties=st.booleans(),
)
def test_equal_to_a_log_softmax_and_a_sort(seed: int, vocab: int, top: list[int], ties: bool) -> None:
    """Values, ranks and alternatives; equal logits rank by id, and rows may ask for different numbers."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((len(top), vocab)) * 5).astype(np.float32)
    if ties:
        logits = np.round(logits)
    tokens = rng.integers(0, vocab, len(top)).tolist()
    for row, entry in enumerate(token_logprobs(logits, tokens, top)):
        exact = logits[row].astype(np.float64)
        exact -= exact.max()
        exact -= np.log(np.exp(exact).sum())
        order = sorted(range(vocab), key=lambda token: (-logits[row, token], token))
        assert entry.token_id == tokens[row]
        assert entry.rank == order.index(tokens[row]) + 1
        assert entry.logprob == pytest.approx(exact[tokens[row]], abs=1e-5)
        assert [token for token, _ in entry.top] == order[: top[row]]
        assert [value for _, value in entry.top] == pytest.approx(exact[order[: top[row]]], abs=1e-5)


def test_they_are_of_the_raw_distribution() -> None:
    """As in the OpenAI API and vLLM's default: temperature, bias and penalties do not move them."""
    logits = np.log(np.array([[0.1, 0.2, 0.3, 0.4]], np.float32))
    sampler = Sampler(4, ())
    sampler.add(0, SamplingParams(seed=1, temperature=0.1, logit_bias={0: 100.0}, logprobs=2), [3], 0)
    result = sampler.sample(logits, [0])
    entry = result.logprobs[0]
    assert entry is not None
    assert (result.token_ids[0], entry.token_id, entry.rank) == (0, 0, 4)
    assert np.exp(entry.logprob) == pytest.approx(0.1, abs=1e-6)
    assert [(token, pytest.approx(np.exp(value), abs=1e-6)) for token, value in entry.top] == [(3, 0.4), (2, 0.3)]


def test_zero_alternatives_still_report_the_sampled_token() -> None:
    """C38: logprobs 0 is not None."""
    sampler = Sampler(4, ())
    sampler.add(0, SamplingParams(temperature=0, logprobs=0), [], 0)
    sampler.add(1, SamplingParams(temperature=0), [], 0)
    first, second = sampler.sample(np.eye(2, 4, dtype=np.float32), [0, 1]).logprobs
    assert first is not None
    assert (first.token_id, first.rank, first.top) == (0, 1, ())
    assert second is None


def test_only_finite_numbers() -> None:
    """C38: JSON has no infinity. Impossible tokens are floored where asked for, and are no alternatives."""
    logits = np.array([[0, -np.inf, -np.inf, 0]], np.float32)
    entry = token_logprobs(logits, [1], [4])[0]
    assert entry.logprob == LOGPROB_FLOOR
    assert [token for token, _ in entry.top] == [0, 3]


def test_prompt_logprobs_are_of_the_tokens_that_follow() -> None:
    """Also over more rows than are weighed at a time."""
    logits = np.random.default_rng(5).standard_normal((40, 64)).astype(np.float32)
    following = list(range(40))
    sampler = Sampler(64, ())
    assert sampler.prompt_logprobs(logits, following, 3) == token_logprobs(logits, following, [3] * 40)
    assert sampler.prompt_logprobs(logits[:0], [], 3) == []


def test_broken_prompt_logits_are_an_engine_error() -> None:
    logits = np.zeros((2, 8), np.float32)
    logits[1, 3] = np.nan
    with pytest.raises(EngineError, match="NaN"):
        Sampler(8, ()).prompt_logprobs(logits, [0, 1], 0)
