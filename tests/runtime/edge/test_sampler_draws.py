"""Tokens that a device chooses by the sampler's choices are those that the sampler would choose."""

import numpy as np
import pytest

from castline.plugins.cpu.sampling import draw_rows
from castline.runtime.sampler import Sampler
from castline.runtime.sampling_params import SamplingParams

VOCAB = 50
EOS = (2,)
DRAWN = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.5, seed=1),
    SamplingParams(temperature=2.0, seed=2, top_k=7),
    SamplingParams(temperature=1.0, seed=3, top_p=0.8),
    SamplingParams(temperature=0.7, seed=4, min_p=0.05),
    SamplingParams(temperature=1.5, seed=1, ignore_eos=True, min_tokens=5),
]


def sampler_of(params) -> Sampler:
    sampler = Sampler(VOCAB, EOS)
    for key, each in enumerate(params):
        sampler.add(key, each, [1, 2, 3], index=key % 2)
    return sampler


def logits_of(step: int, rows: int) -> np.ndarray:
    return np.random.default_rng(step).normal(0, 3, (rows, VOCAB)).astype(np.float32)


def test_choices_and_sample_agree_at_every_position():
    """Seeds must give the same text on every device: the random number is that of the sequence and its position."""
    keys = range(len(DRAWN))
    here, there = sampler_of(DRAWN), sampler_of(DRAWN)
    for step in range(150):
        logits = logits_of(step, len(DRAWN))
        assert there.wants_logits(keys) == []
        tokens = draw_rows(logits, there.choices(keys)).tolist()
        there.record(keys, tokens)
        assert tokens == here.sample(logits, keys).token_ids


def test_choices_ahead_are_those_of_the_next_token():
    """A step is submitted before the last one's tokens are recorded; at 64 the stream begins a new block."""
    keys = range(len(DRAWN))
    sampler = sampler_of(DRAWN)
    for step in range(150):
        ahead = sampler.choices(keys, 1).copy()
        now = sampler.choices(keys).copy()
        assert (ahead["uniform"] != now["uniform"])[1:5].all()
        sampler.record(keys, [0] * len(DRAWN))
        assert (sampler.choices(keys) == ahead).all(), step


def test_a_part_of_the_sequences_is_recorded():
    """Those of a step that have ended meanwhile are not: the others' positions must not depend on them."""
    sampler, other = sampler_of(DRAWN), sampler_of(DRAWN)
    sampler.record([1, 3], [5, 6])
    other.record([0, 1, 2, 3], [4, 5, 6, 7])
    assert (sampler.choices([1, 3]) == other.choices([1, 3])).all()
    assert (sampler.choices([2])["uniform"] != other.choices([2])["uniform"]).all()


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 0},
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
    ],
)
def test_options_that_need_the_host_say_so(options):
    """A device that chose these tokens would ignore the option."""
    sampler = sampler_of([SamplingParams(), SamplingParams(**options), SamplingParams(), SamplingParams(**options)])
    for _ in range(3):
        assert sampler.wants_logits(range(4)) == sampler.wants_logits(range(4), 1) == [1, 3]
        assert sampler.wants_logits([0, 2]) == []
        sampler.sample(logits_of(0, 4), range(4))


def test_min_tokens_needs_the_host_until_it_is_reached():
    """Only the first tokens are forbidden to end the text; from then on the device can choose."""
    sampler = sampler_of([SamplingParams(min_tokens=3), SamplingParams(min_tokens=3, logprobs=1)])
    wanted = []
    for _ in range(5):
        wanted.append((sampler.wants_logits([0, 1]), sampler.wants_logits([0, 1], 1)))
        sampler.sample(logits_of(1, 2), [0, 1])
    both, one = [0, 1], [1]
    assert wanted == [(both, both), (both, both), (both, one), (one, one), (one, one)]
