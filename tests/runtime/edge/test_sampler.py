"""The sampler against a slow reference that sorts, normalises and counts in plain Python."""

import math
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from castline.engines.errors import ErrorCode
from castline.runtime.draw import Choice, draw
from castline.runtime.sampler import Sampler
from castline.runtime.sampler_api import BrokenLogits
from castline.runtime.sampling_params import SamplingParams

EOS = (2, 5)
GREEDY = SamplingParams(temperature=0)


def reference_distribution(
    row: Sequence[float], params: SamplingParams, prompt: Sequence[int] = (), generated: Sequence[int] = ()
) -> dict[int, float]:
    """Probability of every token that may be chosen next. Written from the definitions, one option after the other."""
    logits = [float(x) for x in row]
    for token, bias in params.logit_bias.items():
        logits[token] = -math.inf if bias == -100 else logits[token] + bias
    if len(generated) < params.min_tokens:
        for token in {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}:
            logits[token] = -math.inf
    for token in {*prompt, *generated}:
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in Counter(generated).items():
        logits[token] -= params.presence_penalty + params.frequency_penalty * count
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.greedy:
        return {order[0]: 1.0}
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = {token: math.exp((logits[token] - logits[order[0]]) / params.temperature) for token in order}
    total, mass, nucleus = sum(weights.values()), 0.0, []
    for token in order:
        if params.top_p < 1 and nucleus and mass >= params.top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    kept = [token for token in nucleus if weights[token] >= params.min_p]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept if weights[token] > 0}


def random_logits(seed: int, rows: int, vocab: int, scale: float = 3.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


def sampler_of(vocab: int, *params: SamplingParams, prompt: Sequence[int] = (1, 3), index: int = 0) -> Sampler:
    """Sequences 0, 1, … with these parameters."""
    sampler = Sampler(vocab, EOS, entropy=iter(range(1_000_000)).__next__)
    for key, wanted in enumerate(params):
        sampler.add(key, wanted, prompt, index)
    return sampler


def choice_of(params: SamplingParams, uniform: NDArray[np.float64]) -> Choice:
    rows = len(uniform)
    return Choice(
        temperature=np.full(rows, params.temperature),
        top_k=np.full(rows, params.top_k),
        top_p=np.full(rows, params.top_p),
        min_p=np.full(rows, params.min_p),
        uniform=uniform,
    )


# Distributions

options = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 7, 60, 300]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)


@settings(deadline=None, max_examples=300)
@given(params=options, seed=st.integers(0, 2**32 - 1), vocab=st.sampled_from([3, 40, 257, 600]), flat=st.booleans())
def test_a_sweep_of_the_uniform_gives_each_token_its_share(
    params: SamplingParams, seed: int, vocab: int, flat: bool
) -> None:
    """Evenly spread uniforms must land on each token in proportion to its probability: truncation sets, ties and
    the arithmetic of the inversion are all in it, and no luck."""
    row = random_logits(seed, 1, vocab, 0.3 if flat else 3.0)[0]
    row[vocab // 3 : vocab // 2] = row[0]  # ties, which truncation must cut by id
    points = 1024
    uniform = (np.arange(points) + 0.5) / points
    logits = np.broadcast_to(row, (points, vocab))
    tokens = draw(logits, logits.max(axis=1), choice_of(params, uniform))
    expected = reference_distribution(row.tolist(), params)
    seen = Counter(tokens.tolist())
    assert set(seen) <= set(expected)
    for token, probability in expected.items():
        assert abs(seen[token] - probability * points) <= 1.01


@pytest.mark.parametrize("vocab", [5, 256, 257, 900])
@pytest.mark.parametrize("temperature", [0.2, 1.0])
def test_an_untruncated_sweep_over_several_blocks(vocab: int, temperature: float) -> None:
    """The inversion finds the block first, then the token inside it."""
    row = random_logits(vocab, 1, vocab, 0.5)[0]
    row[3:5] = -np.inf
    points = 4096
    logits = np.broadcast_to(row, (points, vocab))
    uniform = (np.arange(points) + 0.5) / points
    tokens = draw(logits, logits.max(axis=1), choice_of(SamplingParams(temperature=temperature), uniform))
    expected = reference_distribution(row.tolist(), SamplingParams(temperature=temperature))
    seen = Counter(tokens.tolist())
    assert set(seen) <= set(expected)
    for token, probability in expected.items():
        assert abs(seen[token] - probability * points) <= 1.01


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.999999)])
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_uniform_never_choose_the_impossible(params: SamplingParams, uniform: float) -> None:
    """At 0 a leading, and at almost 1 through rounding a trailing token of probability 0 could be taken."""
    logits = random_logits(2, 500, 700)
    logits[:, :10] = logits[:, 250:300] = logits[:, 520:] = -np.inf
    tokens = draw(logits, logits.max(axis=1), choice_of(params, np.full(500, uniform)))
    assert np.isfinite(logits[np.arange(500), tokens]).all()


def test_truncation_at_equality() -> None:
    """The token that reaches top-p exactly is the last one; min-p keeps a token that is exactly that likely."""
    row = np.zeros(4, np.float32)
    for params, kept in [(SamplingParams(top_p=0.5), {0, 1}), (SamplingParams(min_p=1.0), {0, 1, 2, 3})]:
        logits = np.broadcast_to(row, (64, 4))
        tokens = draw(logits, logits.max(axis=1), choice_of(params, (np.arange(64) + 0.5) / 64))
        assert set(tokens.tolist()) == kept == set(reference_distribution(row.tolist(), params))


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0])
@pytest.mark.parametrize("params", [SamplingParams(top_p=0.95), SamplingParams(min_p=0.02), SamplingParams(top_k=900)])
def test_wide_truncation_sets_are_complete(params: SamplingParams, scale: float) -> None:
    """A flat distribution keeps thousands of tokens: the search must widen its head until none is missed."""
    vocab = 20_000
    row = random_logits(11, 1, vocab, scale)[0]
    expected = reference_distribution(row.tolist(), params)
    points = 64
    logits = np.broadcast_to(row, (points, vocab))
    tokens = draw(logits, logits.max(axis=1), choice_of(params, (np.arange(points) + 0.5) / points))
    order = sorted(expected, key=lambda token: (-row[token], token))
    cumulative = np.cumsum([expected[token] for token in order])
    places = np.searchsorted(cumulative, (np.arange(points) + 0.5) / points, side="right")
    for token, place in zip(tokens.tolist(), places.tolist(), strict=True):
        assert abs(order.index(token) - place) <= 1  # float32 sums may tip a boundary by one token


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(top_p=0.8, repetition_penalty=1.3),
        SamplingParams(min_p=0.1, logit_bias={4: 2.0, 7: -100}),
    ],
)
def test_seeds_sample_the_distribution(params: SamplingParams) -> None:
    """Chi-square over 4000 seeds: the uniforms of different seeds must be independent and spread over [0, 1)."""
    vocab, draws = 12, 4000
    row = random_logits(3, 1, vocab, 1.0)
    expected = reference_distribution(row[0].tolist(), params, prompt=(1, 3))
    sampler = sampler_of(vocab, *(replace(params, seed=seed) for seed in range(draws)))
    tokens = sampler.sample(np.repeat(row, draws, axis=0), range(draws)).token_ids
    seen = Counter(tokens)
    assert set(seen) <= set(expected)
    chi_square = sum((seen[t] - p * draws) ** 2 / (p * draws) for t, p in expected.items())
    degrees = len(expected) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


def test_positions_and_continuations_draw_anew() -> None:
    """One seed must not repeat its luck: positions of a text, and the n continuations, are independent."""
    vocab, steps = 50, 200
    row = np.zeros((1, vocab), np.float32)
    texts = []
    for index in range(3):
        sampler = sampler_of(vocab, SamplingParams(seed=9), index=index)
        texts.append([int(sampler.sample(row, [0]).token_ids[0]) for _ in range(steps)])
    assert all(len(set(text)) > vocab * 0.9 for text in texts)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert sum(a == b for a, b in zip(texts[first], texts[second], strict=True)) < 4 * steps / vocab


# Rows do not know each other

MIX: list[SamplingParams] = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_p=0.9),
    SamplingParams(seed=3, top_k=4, temperature=0.7),
    SamplingParams(seed=4, min_p=0.1, presence_penalty=0.5),
    replace(GREEDY, repetition_penalty=1.5, logprobs=3),
    SamplingParams(seed=-5, logit_bias={3: 5.0}, min_tokens=4, logprobs=0),
]


@settings(deadline=None, max_examples=40)
@given(order=st.permutations(range(len(MIX))), alone=st.integers(0, len(MIX) - 1), seed=st.integers(0, 2**32 - 1))
def test_the_text_is_the_same_alone_and_in_any_batch(order: list[int], alone: int, seed: int) -> None:
    """C27 and seeds: neighbours, their options, the row and a pause (preemption) change no token and no logprob."""
    vocab, steps = 700, 6
    logits = random_logits(seed, steps * len(MIX), vocab, 1.5).reshape(steps, len(MIX), vocab)
    solo, batch = sampler_of(vocab, *MIX), sampler_of(vocab, *MIX)
    for step in range(steps):
        paused = order[step % len(order)]
        keys = [key for key in order if key != paused or key == alone]
        together = batch.sample(np.ascontiguousarray(logits[step, keys]), keys)
        single = solo.sample(logits[step, alone : alone + 1].copy(), [alone])
        at = keys.index(alone)
        assert together.token_ids[at] == single.token_ids[0]
        assert (together.logprobs or [None] * len(keys))[at] == (single.logprobs or [None])[0]


def test_random_numbers_go_on_in_whatever_batch() -> None:
    """They are gathered for many steps of one batch: where another has the sequence meanwhile, each is still used once,
    and in order."""
    rng = np.random.default_rng(4)
    params = [SamplingParams(seed=key) for key in range(5)]
    flat = np.zeros((5, 10_000), np.float32)
    batch = sampler_of(10_000, *params)
    texts: list[list[int]] = [[] for _ in params]
    for _ in range(24):
        keys = tuple(sorted(rng.choice(5, int(rng.integers(1, 6)), replace=False).tolist()))
        for _ in range(int(rng.choice([1, 2, 15, 16, 17, 40]))):
            ahead = batch.choices(keys, ahead=1)["uniform"].tolist()
            for key, token in zip(keys, batch.sample(flat[: len(keys)], keys).token_ids, strict=True):
                texts[key].append(token)
            assert batch.choices(keys)["uniform"].tolist() == ahead
    assert min(map(len, texts)) > 128
    for key, text in enumerate(texts):
        solo = sampler_of(10_000, *params)
        assert text == [solo.sample(flat[:1], [key]).token_ids[0] for _ in text]


def test_seeds_of_either_sign_differ() -> None:
    """A seed is any int64."""
    row = np.zeros((2, 1000), np.float32)
    sampler = sampler_of(1000, SamplingParams(seed=-5), SamplingParams(seed=5))
    texts = np.array([sampler.sample(row, [0, 1]).token_ids for _ in range(20)])
    assert (texts[:, 0] != texts[:, 1]).sum() > 15


def test_a_seedless_request_takes_entropy_once_per_sequence() -> None:
    """Two requests without a seed must not share their luck, and neither may depend on a global generator."""
    row = np.zeros((2, 1000), np.float32)
    sampler = sampler_of(1000, SamplingParams(), SamplingParams())
    texts = np.array([sampler.sample(row, [0, 1]).token_ids for _ in range(20)])
    assert (texts[:, 0] != texts[:, 1]).sum() > 15
    again = sampler_of(1000, SamplingParams(seed=0))
    assert [int(again.sample(row[:1], [0]).token_ids[0]) for _ in range(20)] == texts[:, 0].tolist()


# Options that edit logits


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    prompt=st.lists(st.integers(0, 29), max_size=8),
    repetition=st.sampled_from([1.0, 0.7, 1.3]),
    presence=st.sampled_from([0.0, -1.0, 1.5]),
    frequency=st.sampled_from([0.0, 0.4, -0.5]),
    bias=st.dictionaries(st.integers(0, 29), st.sampled_from([-100.0, -3.0, 4.0, 100.0]), max_size=5),
    min_tokens=st.integers(0, 5),
    ignore_eos=st.booleans(),
)
def test_greedy_with_edits_follows_the_reference(
    seed: int,
    prompt: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    min_tokens: int,
    ignore_eos: bool,
) -> None:
    """C29: presence and frequency count generated tokens only, repetition the prompt too; over a whole text."""
    params = SamplingParams(
        temperature=0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=(8,),
    )
    sampler = sampler_of(30, params, prompt=prompt)
    logits = random_logits(seed, 40, 30)
    generated: list[int] = []
    for row in logits:
        expected = reference_distribution(row.tolist(), params, prompt, generated)
        token = int(sampler.sample(row[None], [0]).token_ids[0])
        assert {token} == set(expected)
        generated.append(token)


def test_presence_and_frequency_leave_the_prompt_alone() -> None:
    """C29, said in numbers."""
    row = np.array([[0, 1.0, 0.9, 0]], np.float32)
    for params, expected in [
        (replace(GREEDY, presence_penalty=0.2), [1, 2, 1, 1]),
        (replace(GREEDY, frequency_penalty=0.2), [1, 2, 1, 2]),
        (replace(GREEDY, repetition_penalty=1.2), [2, 1, 1, 1]),
    ]:
        sampler = sampler_of(4, params, prompt=[1])
        assert [int(sampler.sample(row, [0]).token_ids[0]) for _ in expected] == expected, params


def test_bias_of_minus_100_is_never_sampled() -> None:
    """C30: even where the model would choose nothing else."""
    row = np.full((1, 8), -50, np.float32)
    row[0, 3] = 400
    for params in (SamplingParams(temperature=0, logit_bias={3: -100}), SamplingParams(logit_bias={3: -100.0}, seed=1)):
        sampler = sampler_of(8, params)
        assert all(sampler.sample(row, [0]).token_ids[0] != 3 for _ in range(100))


def test_min_tokens_forbids_what_would_end_the_text_and_nothing_else() -> None:
    """EOS and stop ids come as soon as they may; an EOS that ends nothing (ignore_eos) is no reason to forbid it."""
    row = np.zeros((1, 10), np.float32)
    row[0, [2, 5, 7, 1]] = [9, 8, 7, 6]
    wanted = replace(GREEDY, min_tokens=2, stop_token_ids=(7,))
    assert _greedy_text(row, wanted, 4) == [1, 1, 2, 2]
    assert _greedy_text(row, replace(wanted, ignore_eos=True), 4) == [2, 2, 2, 2]
    row[0, 7] = 10
    assert _greedy_text(row, replace(wanted, ignore_eos=True), 4) == [2, 2, 7, 7]


def _greedy_text(row: NDArray[np.float32], params: SamplingParams, steps: int) -> list[int]:
    sampler = sampler_of(row.shape[1], params)
    return [int(sampler.sample(row, [0]).token_ids[0]) for _ in range(steps)]


def test_eos_ids_beyond_the_vocabulary_are_harmless() -> None:
    """generation_config.json of some models lists ids that their output head does not have."""
    sampler = Sampler(6, (2, 600, -1))
    sampler.add(0, SamplingParams(temperature=0, min_tokens=3), [], 0)
    assert sampler.sample(np.array([[0, 1, 9, 0, 0, 0]], np.float32), [0]).token_ids == [1]


# Cost


def test_a_greedy_batch_neither_sorts_nor_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The common case is one pass over the logits."""
    logits = random_logits(0, 16, 49152)
    sampler = sampler_of(49152, *[GREEDY] * 16)
    for name in ("sort", "argsort", "partition", "argpartition", "exp"):
        monkeypatch.setattr(np, name, _forbidden(name))
    peak = _peak_bytes(lambda: sampler.sample(logits, range(16)))
    assert peak < 49152
    monkeypatch.undo()
    assert sampler.sample(logits, range(16)).token_ids == logits.argmax(axis=1).tolist()


def test_one_row_with_options_costs_one_row() -> None:
    """Neighbours with neutral options must not be copied for it."""
    row_bytes = 49152 * 4
    logits = random_logits(0, 16, 49152)
    for params in (SamplingParams(seed=1), SamplingParams(seed=1, top_p=0.9), replace(GREEDY, presence_penalty=0.5)):
        sampler = sampler_of(49152, *[GREEDY] * 15, params)
        sampler.sample(logits, range(16))
        assert _peak_bytes(lambda sampler=sampler: sampler.sample(logits, range(16))) < 4 * row_bytes


def _forbidden(name: str) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> None:
        raise AssertionError(f"numpy.{name} was called")

    return call


def _peak_bytes(run: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_logits_are_only_read() -> None:
    """The array belongs to the executor."""
    logits = random_logits(0, len(MIX), 400)
    logits.flags.writeable = False
    sampler = sampler_of(400, *MIX)
    sampler.sample(logits, range(len(MIX)))


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert _greedy_text(np.array([[1, 7, 7, 7]], np.float32), GREEDY, 1) == [1]
    assert _greedy_text(np.array([[1, 7, 7, 7]], np.float32), replace(GREEDY, logit_bias={0: 1.0}), 1) == [1]


# Broken logits


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3), SamplingParams(seed=3, top_p=0.5)])
def test_broken_rows_are_named_and_the_others_lose_nothing(bad: float, params: SamplingParams) -> None:
    """A NaN must not become a token. Nothing is recorded, so the rest of the batch is sampled again as if alone."""
    logits = random_logits(0, 4, 300)
    expected = sampler_of(300, *[params] * 4).sample(logits, range(4)).token_ids
    broken = logits.copy()
    broken[1, 200] = bad
    broken[3] = -np.inf
    sampler = sampler_of(300, *[params] * 4)
    with pytest.raises(BrokenLogits) as caught:
        sampler.sample(broken, range(4))
    assert set(caught.value.reasons) == {1, 3}
    assert sampler.sample(logits[[0, 2]], [0, 2]).token_ids == [expected[0], expected[2]]


def test_some_minus_infinity_is_fine() -> None:
    """Models mask padded vocabulary rows that way."""
    row = np.full((1, 300), -np.inf, np.float32)
    row[0, [7, 8]] = 1.0
    for params in (GREEDY, SamplingParams(seed=1), SamplingParams(seed=1, top_k=5), SamplingParams(seed=1, top_p=0.99)):
        sampler = sampler_of(300, params)
        assert {int(sampler.sample(row, [0]).token_ids[0]) for _ in range(20)} <= {7, 8}


def test_forbidding_every_token_ends_that_sequence_only() -> None:
    """logit_bias can leave nothing to choose; that is no reason to choose something."""
    sampler = sampler_of(3, SamplingParams(temperature=0, logit_bias={0: -100, 1: -100, 2: -100}), GREEDY)
    with pytest.raises(BrokenLogits, match="logit_bias") as caught:
        sampler.sample(np.zeros((2, 3), np.float32), [0, 1])
    assert set(caught.value.reasons) == {0}
    assert caught.value.code is ErrorCode.INVALID_VALUE, "the request's fault, not the engine's"


# State


def test_state_goes_with_the_sequence() -> None:
    """C18: nothing is left of two thousand requests."""
    sampler = sampler_of(10)
    for key in range(2_000):
        sampler.add(key, SamplingParams(repetition_penalty=1.1), [1, 2], 0)
        sampler.sample(np.zeros((1, 10), np.float32), [key])
        sampler.remove(key)
        sampler.remove(key)
    assert len(sampler) == 0


def test_an_empty_batch_samples_nothing() -> None:
    """A step of prompt chunks alone samples no row."""
    result = sampler_of(10, GREEDY).sample(np.empty((0, 10), np.float32), [])
    assert (result.token_ids, result.logprobs) == ([], [])
