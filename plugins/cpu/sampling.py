"""Tokens from logits by the native library: castline.runtime.draw's mathematics, without its passes over memory."""

import ctypes
from collections.abc import Callable
from functools import cache, partial
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
    """`draw_rows` for arrays that are the same from call to call, as a running batch's are. Not thread-safe.

    Their addresses are kept: NumPy takes longer to tell them than a greedy choice takes.
    """

    def __init__(self, num_threads: int = 1) -> None:
        """Up to *num_threads* threads, the caller's included, share the rows of a large batch; they change no token."""
        assert num_threads > 0, num_threads
        self._num_threads = ctypes.c_int64(num_threads)
        self._given: tuple[NDArray[Any] | None, ...] = (None, None, None)
        self._read: tuple[NDArray[Any] | None, ...] = ()
        """The same, or a copy of a strided one: held while their addresses are."""
        self._tokens = np.empty(0, np.int64)
        self._draw: Callable[[], int] | None = None

    def __call__(
        self, logits: NDArray[np.float32], choices: NDArray[Any], maxima: NDArray[np.float32] | None = None
    ) -> list[int]:
        """See `draw_rows`."""
        given = self._given
        if self._draw is None or logits is not given[0] or choices is not given[1] or maxima is not given[2]:
            self._draw = self._prepare(logits, choices, maxima)
        if self._draw():
            raise EngineError("CASTLINE_ISA names kernels this host lacks")
        return self._tokens.tolist()

    def _prepare(
        self, logits: NDArray[np.float32], choices: NDArray[Any], maxima: NDArray[np.float32] | None
    ) -> Callable[[], int]:
        vocab = logits.shape[1]
        assert logits.dtype == np.float32, logits.dtype
        assert choices.dtype == CHOICE, choices.dtype
        if maxima is not None:
            assert maxima.dtype == np.float32, maxima.dtype
            assert maxima.shape == (len(logits), -(-vocab // MAXIMA_BLOCK)), maxima.shape
        self._read = tuple(
            None if array is None else np.ascontiguousarray(array) for array in (logits, choices, maxima)
        )
        same = all(array is None or array.flags.c_contiguous for array in (logits, choices, maxima))
        self._given = (logits, choices, maxima) if same else (None, None, None)  # a copy is made each time
        if len(self._tokens) != len(choices):
            self._tokens = np.empty(len(choices), np.int64)
        at_logits, at_choices, at_maxima = (_address(array) for array in self._read)
        count = ctypes.c_int64(len(choices))
        at_tokens = _address(self._tokens)
        return partial(
            _native(), at_logits, at_maxima, ctypes.c_int64(vocab), count, at_choices, at_tokens, self._num_threads
        )


def _address(array: NDArray[Any] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def draw_rows(
    logits: NDArray[np.float32],
    choices: NDArray[Any],
    maxima: NDArray[np.float32] | None = None,
    num_threads: int = 1,
) -> NDArray[np.int64]:
    """The token of each of *choices* (dtype CHOICE) from its row of *logits* [.., vocabulary], or NO_TOKEN.

    *maxima* [.., blocks] are those of the same rows (castline.plugins.linear.MAXIMA_BLOCK), where they are known: then
    a greedy choice reads one block of its row.
    *num_threads* is as for `RowDraws`. The interpreter lock is released meanwhile. Raises EngineError where
    CASTLINE_ISA is refused.
    """
    return np.array(RowDraws(num_threads)(logits, choices, maxima), np.int64)


@cache
def _native() -> Any:
    draw = library().castline_draw
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    draw.argtypes = (pointer, pointer, integer, integer, pointer, pointer, integer)
    return draw
