"""Tokens from logits by the native library: castline.runtime.draw's mathematics, without its passes over memory."""

import ctypes
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from castline.engines.errors import EngineError
from castline.plugins.cpu.library import library
from castline.plugins.linear import MAXIMA_BLOCK

NO_TOKEN: Final = -1
"""In place of a token, for a row with a NaN or +infinity, or with nothing above -infinity."""

CHOICE: Final = np.dtype(
    [
        ("row", np.int64),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("uniform", np.float64),
    ]
)
"""How the token of a row is chosen: temperature 0 takes the best (of equal ones the lowest id); top_k 0, top_p 1 and
min_p 0 truncate nothing; uniform, in [0, 1), chooses. The pair of struct Choice in sampling.h."""


class RowDraws:
    """`draw_rows` for arrays that are the same from call to call, as a running batch's are. Not thread-safe."""

    def __init__(self) -> None:
        self._logits = _Pinned(np.dtype(np.float32))
        self._maxima = _Pinned(np.dtype(np.float32))
        self._choices = _Pinned(CHOICE)
        self._tokens = np.empty(0, np.int64)
        self._to_tokens = 0

    def __call__(
        self, logits: NDArray[np.float32], choices: NDArray[Any], maxima: NDArray[np.float32] | None = None
    ) -> NDArray[np.int64]:
        """See `draw_rows`."""
        count, vocab = len(choices), logits.shape[1]
        at_logits, at_choices, at_maxima = self._logits.address(logits), self._choices.address(choices), None
        if maxima is not None:
            assert maxima.shape == (len(logits), -(-vocab // MAXIMA_BLOCK)), maxima.shape
            at_maxima = self._maxima.address(maxima)
        if count != len(self._tokens):
            self._tokens = np.empty(count, np.int64)
            self._to_tokens = self._tokens.ctypes.data
        if _native()(at_logits, at_maxima, vocab, count, at_choices, self._to_tokens):
            raise EngineError("CASTLINE_ISA names kernels this host lacks")
        return self._tokens.copy()


class _Pinned:
    """The last array and its address, which takes NumPy longer to tell than a greedy choice takes."""

    __slots__ = ("_address", "_array", "_dtype")

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._address = 0
        self._array: NDArray[Any] | None = None

    def address(self, array: NDArray[Any]) -> int:
        """Of the elements in C order: a strided array, which is never the one that is kept, is copied each time."""
        if array is not self._array:
            assert array.dtype == self._dtype, array.dtype
            self._array = np.ascontiguousarray(array)
            self._address = self._array.ctypes.data
        return self._address


def draw_rows(
    logits: NDArray[np.float32], choices: NDArray[Any], maxima: NDArray[np.float32] | None = None
) -> NDArray[np.int64]:
    """The token of each of *choices* (dtype CHOICE) from its row of *logits* [.., vocabulary], or NO_TOKEN.

    *maxima* [.., blocks] are those of the same rows (castline.plugins.linear.MAXIMA_BLOCK), where they are known: then
    a greedy choice reads one block of its row.
    The interpreter lock is released meanwhile. Raises EngineError where CASTLINE_ISA is refused.
    """
    return RowDraws()(logits, choices, maxima)


@cache
def _native() -> Any:
    draw = library().castline_draw
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    draw.argtypes = (pointer, pointer, integer, integer, pointer, pointer)
    return draw
