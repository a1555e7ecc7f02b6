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


def draw_rows(
    logits: NDArray[np.float32], choices: NDArray[Any], maxima: NDArray[np.float32] | None = None
) -> NDArray[np.int64]:
    """The token of each of *choices* (dtype CHOICE) from its row of *logits* [.., vocabulary], or NO_TOKEN.

    *maxima* [.., blocks] are those of the same rows (castline.plugins.linear.MAXIMA_BLOCK), where they are known: then
    a greedy choice reads one block of its row.
    The interpreter lock is released meanwhile. Raises EngineError where CASTLINE_ISA is refused.
    """
    assert logits.dtype == np.float32, logits.dtype
    assert choices.dtype == CHOICE, choices.dtype
    logits, choices = np.ascontiguousarray(logits), np.ascontiguousarray(choices)
    at_maxima = None
    if maxima is not None:
        assert maxima.dtype == np.float32, maxima.dtype
        assert maxima.shape == (len(logits), -(-logits.shape[1] // MAXIMA_BLOCK)), maxima.shape
        maxima = np.ascontiguousarray(maxima)
        at_maxima = _address(maxima)
    tokens = np.empty(len(choices), np.int64)
    args = (_address(logits), at_maxima, logits.shape[1], len(choices), _address(choices), _address(tokens))
    if _native()(*args):
        raise EngineError("CASTLINE_ISA names kernels this host lacks")
    return tokens


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@cache
def _native() -> Any:
    draw = library().castline_draw
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    draw.argtypes = (pointer, pointer, integer, integer, pointer, pointer)
    return draw
