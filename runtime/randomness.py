"""Random numbers that depend on a sequence and a position alone, never on the batch or on what was drawn before."""

import numpy as np
from numpy.typing import NDArray

_BLOCK = 64
_UINT64 = (1 << 64) - 1


class UniformStream:
    """Uniforms in [0, 1): number *position* is a pure function of (seed, index, position).

    Philox is a counter-based generator: the key is (seed, index), and each block of positions has a counter of its own
    in the second counter word, so blocks never overlap and any of them can be made again at any time.
    """

    def __init__(self, seed: int, index: int) -> None:
        self._key = np.array([seed & _UINT64, index & _UINT64], dtype=np.uint64)
        self._first = 0
        self._values = np.empty(0)
        """Of the block of positions from *_first* on."""

    def at(self, position: int) -> float:
        if not 0 <= position - self._first < len(self._values):
            self._make(position // _BLOCK)
        return float(self._values[position - self._first])

    def run(self, position: int, count: int) -> NDArray[np.float64]:
        """The *count* numbers from *position* on, at most a block."""
        self.at(position)
        numbers = self._values[position - self._first :][:count]
        if len(numbers) < count:
            self.at(self._first + _BLOCK)
            numbers = np.concatenate([numbers, self._values[: count - len(numbers)]])
        return numbers

    def _make(self, block: int) -> None:
        counter = np.array([0, block, 0, 0], dtype=np.uint64)
        self._values = np.random.Generator(np.random.Philox(key=self._key, counter=counter)).random(_BLOCK)
        self._first = block * _BLOCK
