"""The block-wise search for the most likely tokens against a full sort."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from castline.runtime import top_tokens as module
from castline.runtime.top_tokens import top_tokens, top_values

SPECIAL_VALUES = [-np.inf, -0.0, 0.0, 1.0, 1.0000001, -1.0, 3.4e38, -3.4e38, 1e-45]


def reference(row: NDArray[np.float32], k: int) -> list[int]:
    """All ids sorted by logit descending, then id ascending; the first k."""
    return sorted(range(len(row)), key=lambda token: (-float(row[token]), token))[:k]


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 2, 31, 32, 33, 500, 4096, 4100, 8191]),
    k=st.integers(1, 40),
    distinct=st.sampled_from([2, 5, 60, 100_000]),
)
def test_equals_a_full_sort_ties_included(seed: int, vocab: int, k: int, distinct: int) -> None:
    """With few distinct values nearly everything is a tie, also across blocks and in the tail that fills no block."""
    rng = np.random.default_rng(seed)
    pool = np.concatenate([rng.standard_normal(distinct), SPECIAL_VALUES]).astype(np.float32)
    logits = rng.choice(pool, (3, vocab))
    k = min(k, vocab)
    ids, values = top_tokens(logits, k)
    for row in range(3):
        expected = reference(logits[row], k)
        assert ids[row].tolist() == expected
        assert values[row].tolist() == logits[row][expected].tolist()
    assert top_values(logits, k).tolist() == values.tolist()


def test_the_whole_vocabulary_and_none_of_it() -> None:
    logits = np.array([[1, 3, 2]], np.float32)
    assert top_tokens(logits, 3)[0].tolist() == [[1, 2, 0]]
    assert top_tokens(logits, 0)[0].shape == (1, 0)


def test_few_tokens_of_a_large_vocabulary_are_found_in_few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The point of the blocks: what is put in order is a small part of the vocabulary."""
    widths = []
    original = module._largest
    monkeypatch.setattr(module, "_largest", lambda values, k: (widths.append(values.shape[1]), original(values, k))[1])
    logits = np.random.default_rng(0).standard_normal((4, 49152)).astype(np.float32)
    top_values(logits, 64)
    top_tokens(logits, 5)
    assert widths == [64 * module.BLOCK_TOKENS, 5 * module.BLOCK_TOKENS]
