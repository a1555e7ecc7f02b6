"""The k most likely tokens of each row, in one total order, without sorting the vocabulary.

Order: logit descending, then token id ascending, so ties have one answer whatever the batch. The vocabulary is cut
into strided blocks (block b holds ids b, b + blocks, b + 2·blocks, …: their maxima are one pass over contiguous
memory). The k-th largest block maximum is a lower bound of the k-th largest logit, so only blocks that reach it can
hold a wanted token.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
Number = TypeVar("Number", np.float32, np.int64)

BLOCK_TOKENS = 32
_ID_MASK = 0x7FFFFFFF


def top_values(logits: Logits, k: int) -> Logits:
    """The *k* largest logits of each row, descending: [rows, k]. No logit may be NaN; k is from 1 to the width."""
    ids = _candidates(logits, k)
    return _largest(logits if ids is None else np.take_along_axis(logits, ids, axis=1), k)


def top_tokens(logits: Logits, k: int) -> tuple[Ids, Logits]:
    """Ids and logits, each [rows, k], of the first *k* tokens of each row. As `top_values`, but k may be 0."""
    if k == 0:
        return np.empty((len(logits), 0), np.int64), logits[:, :0]
    ids = _candidates(logits, k)
    if ids is None:
        ids = np.broadcast_to(np.arange(logits.shape[1]), logits.shape)
    keys = _largest(_keys(np.take_along_axis(logits, ids, axis=1), ids), k)
    top = _ID_MASK - (keys & _ID_MASK)
    return top, np.take_along_axis(logits, top, axis=1)


def _candidates(logits: Logits, k: int) -> Ids | None:
    """Ids of a superset of each row's first *k* tokens, [rows, n]; None where it would not be much smaller than the
    row.
    """
    rows, vocab = logits.shape
    blocks = vocab // BLOCK_TOKENS
    if k * 4 > blocks:
        return None
    tail = blocks * BLOCK_TOKENS
    maxima = logits[:, :tail].reshape(rows, BLOCK_TOKENS, blocks).max(axis=1)
    bound = np.partition(maxima, blocks - k, axis=1)[:, blocks - k]
    reaching = int(np.count_nonzero(maxima >= bound[:, None], axis=1).max(initial=k))  # above k where maxima tie
    if reaching * 4 > blocks:
        return None
    chosen = np.argpartition(maxima, blocks - reaching, axis=1)[:, blocks - reaching :]
    ids = (np.arange(BLOCK_TOKENS)[:, None] * blocks + chosen[:, None, :]).reshape(rows, -1)
    return np.concatenate([ids, np.broadcast_to(np.arange(tail, vocab), (rows, vocab - tail))], axis=1)


def _keys(values: Logits, ids: Ids) -> Ids:
    """Integers that order as (value ascending, id descending): the float's bits made monotonic, then the id."""
    bits = (values + np.float32(0)).view(np.int32)  # + 0 turns -0 into 0, which is its equal
    ordered = bits ^ ((bits >> 31) & _ID_MASK)
    return (ordered.astype(np.int64) << 32) | (_ID_MASK - ids)


def _largest(values: NDArray[Number], k: int) -> NDArray[Number]:
    """The *k* largest of each row, descending."""
    width = values.shape[1]
    head = values if k == width else np.partition(values, width - k, axis=1)
    return np.sort(head[:, width - k :], axis=1)[:, ::-1]
