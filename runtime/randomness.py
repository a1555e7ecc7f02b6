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
        self._block = -1
        self._values: NDArray[np.float64] = np.empty(0)

    def at(self, position: int) -> float:
        block, offset = divmod(position, _BLOCK)
        if block != self._block:
            counter = np.array([0, block, 0, 0], dtype=np.uint64)
            self._values = np.random.Generator(np.random.Philox(key=self._key, counter=counter)).random(_BLOCK)
            self._block = block
        return float(self._values[offset])
