"""The native draw against the reference in NumPy, on every instruction set of this host."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from castline.engines.errors import EngineError
from castline.plugins.cpu import sampling
from castline.plugins.cpu.library import available_isas
from castline.plugins.linear import MAXIMA_BLOCK
from castline.runtime import draw as reference

SPECIAL = (-np.inf, -3.4e38, -0.0, 0.0, 1e-45, 30.0)
VOCABS = (1, 2, 15, 63, 64, 65, 500, 4096, 9000)


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CASTLINE_ISA", request.param)
    return str(request.param)


def choices_of(rows: int, rng: np.random.Generator) -> NDArray[Any]:
    """One of every kind of choice in random order: greedy, full, and each truncation alone and with others."""
    choices = np.zeros(rows, sampling.CHOICE)
    choices["row"] = rng.permutation(rows)
    choices["temperature"] = rng.choice([0.0, 0.05, 0.7, 1.0, 2.5], rows)
    choices["top_k"] = rng.choice([0, 0, 1, 3, 40, 700, 10**6], rows)
    choices["top_p"] = rng.choice([1.0, 1.0, 0.1234, 0.9, 0.99999], rows)
    choices["min_p"] = rng.choice([0.0, 0.0, 0.0123, 0.7], rows)
    choices["uniform"] = rng.random(rows)
    return choices


def is_between(row: NDArray[np.float32], choice: Any, tokens: tuple[int, int]) -> bool:
    """Whether *choice* lies so near the border of two tokens that rounding decides. In float64, all sorted."""
    order = sorted(range(len(row)), key=lambda token: (-float(row[token]), token))
    truncated = choice["top_k"] > 0 or choice["top_p"] < 1 or choice["min_p"] > 0
    ids = np.array(order if truncated else range(len(row)))
    weights = np.exp((row[ids].astype(np.float64) - row.max()) / choice["temperature"])
    if choice["top_k"] > 0:
        weights[choice["top_k"] :] = 0
    cumulative = np.cumsum(weights)
    total = cumulative[-1]
    near_line = np.abs((cumulative - weights) - choice["top_p"] * total) < 1e-5 * total
    if choice["top_p"] < 1 and near_line.any():
        return True
    kept = ((cumulative - weights) < choice["top_p"] * total) | (choice["top_p"] >= 1)
    cumulative = np.cumsum(np.where(kept & (weights >= choice["min_p"]), weights, 0.0))
    target = choice["uniform"] * cumulative[-1]
    places = [int(np.flatnonzero(ids == token)[0]) for token in tokens]
    border = cumulative[min(places)]
    return bool(abs(border - target) < 1e-5 * cumulative[-1])


def maxima_of(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """As an engine's head gives them."""
    rows, vocab = logits.shape
    padded = np.pad(logits, ((0, 0), (0, -vocab % MAXIMA_BLOCK)), constant_values=-np.inf)
    return padded.reshape(rows, -1, MAXIMA_BLOCK).max(axis=2).clip(np.finfo(np.float32).min)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from(VOCABS),
    distinct=st.sampled_from([1, 3, 50, 100_000]),
    scale=st.sampled_from([0.1, 3.0, 12.0]),
)
def test_equals_the_reference(isa: str, seed: int, vocab: int, distinct: int, scale: float) -> None:
    """Ties, short last blocks, forbidden tokens, flat and peaked rows, under every option: the same tokens."""
    rng = np.random.default_rng(seed)
    pool = (rng.standard_normal(distinct) * scale).astype(np.float32)
    logits = pool[rng.integers(0, distinct, (12, vocab))]
    special = rng.random((12, vocab)) < rng.choice([0.0, 0.05, 0.9])
    logits[special] = rng.choice(SPECIAL, int(special.sum())).astype(np.float32)
    choices = choices_of(12, rng)
    before = logits.copy()
    with np.errstate(over="ignore"):
        expected = reference.draw_rows(logits, choices)
    tokens = sampling.draw_rows(logits, choices)
    np.testing.assert_array_equal(logits, before)
    for choice, token, other in zip(choices, tokens.tolist(), expected.tolist(), strict=True):
        row = logits[choice["row"]]
        assert token == other or is_between(row, choice, (token, other)), (isa, choice, token, other)


@pytest.mark.parametrize("vocab", [8191, 20_000])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 2.5, 6.0])
def test_a_wide_nucleus_equals_the_reference(isa: str, scale: float, vocab: int) -> None:
    """Thousands of tokens are kept, which nobody puts in order: of ties the right one, at both ends of the uniform, and
    where a sample of the row knows nothing of its weight, because a few tokens or one stretch of them has it all."""
    rng = np.random.default_rng(vocab)
    rows = 30
    logits = (rng.standard_normal((rows, vocab)) * scale).astype(np.float32)
    logits[5:10] = np.round(logits[5:10] * 2) / 2  # a few levels, each of thousands of equal tokens
    logits[10:15, 70:1500] += np.float32(2 * scale)
    logits[15:20, rng.integers(0, vocab, 9)] += np.float32(3 * scale)
    logits[20:25, rng.random(vocab) < 0.7] = -np.inf
    choices = np.zeros(rows, sampling.CHOICE)
    choices["row"] = np.arange(rows)
    choices["temperature"] = rng.choice([0.8, 1.0, 2.0], rows)
    choices["top_p"] = rng.choice([0.5, 0.95, 0.9999, 1.0], rows)
    choices["min_p"] = np.where(choices["top_p"] == 1, 1e-3, rng.choice([0, 0, 0.01], rows))
    for uniform in (0.0, 1 - 2**-53, *rng.random(4)):
        choices["uniform"] = uniform
        expected = reference.draw_rows(logits, choices)
        tokens = sampling.draw_rows(logits, choices)
        for choice, token, other in zip(choices, tokens.tolist(), expected.tolist(), strict=True):
            row = logits[choice["row"]]
            assert token == other or is_between(row, choice, (token, other)), (isa, choice, token, other)


@pytest.mark.parametrize("steepness", [1.0, 1.6, 2.5, 4.0])
def test_a_nucleus_of_text_equals_the_reference(isa: str, steepness: float) -> None:
    """Likelihoods as those of words: where a token is drawn before it is known what is kept, it must be that token for
    all that may be kept, and where min-p ends it, too."""
    rng = np.random.default_rng(int(steepness * 10))
    rows, vocab = 40, 20_000
    ranks = rng.permuted(np.tile(np.arange(1, vocab + 1), (rows, 1)), axis=1)
    logits = (rng.standard_normal((rows, vocab)) * 0.3 - steepness * np.log(ranks)).astype(np.float32)
    choices = np.zeros(rows, sampling.CHOICE)
    choices["row"] = np.arange(rows)
    for _ in range(5):
        choices["temperature"] = rng.choice([0.5, 0.8, 1.0, 1.3], rows)
        choices["top_p"] = rng.choice([0.3, 0.8, 0.95, 0.999], rows)
        choices["min_p"] = rng.choice([0, 0, 0, 1e-3, 0.05], rows)
        choices["uniform"] = rng.random(rows)
        expected = reference.draw_rows(logits, choices)
        tokens = sampling.draw_rows(logits, choices)
        for choice, token, other in zip(choices, tokens.tolist(), expected.tolist(), strict=True):
            row = logits[choice["row"]]
            assert token == other or is_between(row, choice, (token, other)), (isa, choice, token, other)


@pytest.mark.parametrize("place", [0, 70, 299])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_has_no_token(isa: str, bad: float, place: int) -> None:
    """A NaN is easily lost in a vector maximum, and then the row's second best looks sound."""
    logits = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)
    logits[1, place] = bad
    logits[2] = -np.inf
    choices = np.zeros(4, sampling.CHOICE)
    choices["row"] = np.arange(4)
    choices["top_p"] = 1
    for temperature in (0.0, 1.0):
        choices["temperature"] = temperature
        tokens = sampling.draw_rows(logits, choices)
        assert (tokens == sampling.NO_TOKEN).tolist() == [False, True, True, False]
        np.testing.assert_array_equal(tokens, reference.draw_rows(logits, choices))


@pytest.mark.parametrize("vocab", [1, 63, 64, 1000, 5000])
def test_known_maxima_change_nothing(isa: str, vocab: int) -> None:
    """They are there to be read in place of the row; read as another row's, they would find another token."""
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((12, vocab)) * 4).astype(np.float32)
    logits[rng.random((12, vocab)) < 0.2] = -np.inf
    logits[3] = -np.inf
    maxima = maxima_of(logits)
    logits[5, vocab // 2] = np.nan
    maxima[5, vocab // 2 // MAXIMA_BLOCK] = np.nan
    choices = choices_of(12, rng)
    expected = sampling.draw_rows(logits, choices)
    np.testing.assert_array_equal(sampling.draw_rows(logits, choices, maxima), expected)
    assert (expected[np.isin(choices["row"], [3, 5])] == sampling.NO_TOKEN).all()


def test_arrays_that_stay_are_read_anew() -> None:
    """Addresses are kept: of an array that was replaced, of another length, or of the copy of a strided one."""
    rng = np.random.default_rng(11)
    draws = sampling.RowDraws()
    for _ in range(4):
        rows = int(rng.integers(1, 9))
        logits = np.empty((rows, 700), np.float32)
        choices = np.zeros(rows, sampling.CHOICE)
        wide = np.empty((rows, 1400), np.float32)
        for _ in range(3):
            logits[:] = wide[:, ::2] = (rng.standard_normal((rows, 700)) * 3).astype(np.float32)
            choices[:] = choices_of(rows, rng)
            expected = reference.draw_rows(logits, choices).tolist()
            tokens = draws(logits, choices, maxima_of(logits))
            assert tokens == draws(wide[:, ::2], choices) == expected


def test_rows_do_not_depend_on_their_neighbours(isa: str) -> None:
    """Scratch that is left from one row must not reach the next."""
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((24, 5000)) * 4).astype(np.float32)
    choices = choices_of(24, rng)
    together = sampling.draw_rows(logits, choices)
    alone = [int(sampling.draw_rows(logits, choices[i : i + 1])[0]) for i in range(24)]
    assert together.tolist() == alone
    assert sampling.draw_rows(logits, choices[:0]).shape == (0,)


@pytest.mark.parametrize("greedy", [0, 5, 30])
def test_threads_change_no_token(isa: str, greedy: int) -> None:
    """A row drawn twice, left out, or into another thread's scratch; rows of all kinds, with and without maxima."""
    rng = np.random.default_rng(greedy)
    rows, vocab = 40, 33_000
    logits = (rng.standard_normal((rows, vocab)) * rng.choice([0.5, 3, 9], (rows, 1))).astype(np.float32)
    logits[7] = np.nan
    choices = choices_of(rows, rng)
    choices["temperature"][:greedy] = 0
    maxima = maxima_of(logits)
    expected = sampling.draw_rows(logits, choices)
    assert (expected == sampling.NO_TOKEN).sum() == 1
    for num_threads in (2, 3, 2, 1):
        np.testing.assert_array_equal(sampling.draw_rows(logits, choices, maxima, num_threads), expected)
        np.testing.assert_array_equal(sampling.draw_rows(logits, choices, None, num_threads), expected)


def test_calls_at_once_are_apart() -> None:
    """One call has the helping threads; another that comes meanwhile must neither wait for them nor mix its rows in."""
    rng = np.random.default_rng(8)
    logits = (rng.standard_normal((2, 40, 33_000)) * 3).astype(np.float32)
    choices = [choices_of(40, rng) for _ in range(2)]
    expected = [sampling.draw_rows(logits[i], choices[i]).tolist() for i in range(2)]
    start = threading.Barrier(2)

    def draw(i: int) -> list[list[int]]:
        start.wait()
        return [sampling.draw_rows(logits[i], choices[i], None, 3).tolist() for _ in range(20)]

    with ThreadPoolExecutor(2) as pool:
        for i, drawn in enumerate(pool.map(draw, range(2))):
            assert all(tokens == expected[i] for tokens in drawn)


def test_a_forked_process_draws() -> None:
    """It has none of the threads that helped its parent: waiting for them, it would hang."""
    rng = np.random.default_rng(9)
    logits = (rng.standard_normal((40, 33_000)) * 0.5).astype(np.float32)  # flat: rows that are worth help
    choices = choices_of(40, rng)
    expected = sampling.draw_rows(logits, choices, None, 2).tolist()

    def draw() -> None:
        os._exit(sampling.draw_rows(logits, choices, None, 2).tolist() != expected)

    child = get_context("fork").Process(target=draw)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a test of a narrow path could pass on the wide one."""
    monkeypatch.setenv("CASTLINE_ISA", "sse9")
    with pytest.raises(EngineError, match="CASTLINE_ISA"):
        sampling.draw_rows(np.zeros((1, 4), np.float32), np.zeros(1, sampling.CHOICE))
