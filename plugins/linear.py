"""The contract of castline's linear operator, and of the embedding that shares its formats.

``castline::Linear`` is one quantised matmul with what surrounds it in a decoder layer: RMSNorm before, and bias, an
activation (gated or not) and a residual after. ``castline::Embedding`` reads rows of a matrix packed in the same
way: its own, or that of the head it is tied to.

**Packed weights.** W [N, K], K at most 65,536, in *strips* of 16 output columns. K is padded to a multiple of 64 (K'),
where activations are zero, and N to whole strips. One 64-byte line of a strip holds 16 columns by 8 (4-bit) or 4
(8-bit) elements of K, so that one register is the second operand of an integer dot product:

- 4 bits: ``uint8 [strips, K'/8, 16, 4]``. Byte b of column c in line j holds elements 8j + b (low half) and
  8j + 4 + b (high half).
- 8 bits: ``uint8 [strips, K'/4, 16, 4]``: element 4j + b of column c, plus 128.

A gated node interleaves its two matrices by strips: strip 2i holds columns 16i .. 16i + 15 of the gate, strip 2i + 1
the same columns of the up-projection.

**Scales**, ``float16``, G = K' / group:

- W4_DM  ``[strips, G, 2, 16]``: d, then m, of each column; a weight is ``d * q + m`` with q in 0 .. 15
- W4     ``[strips, G, 16]``: a weight is ``d * (q - 8)``
- W8     ``[strips, G, 16]``, or ``[strips, 1, 16]`` with one scale a column (group = 0): ``d * (byte - 128)``

**What is computed** for a row x [K]: ``h = x``, or with norm ``x / sqrt(mean(x^2) + norm_eps) * norm_weight``. Then
``y = h W^T + bias``; then ``activation(gate) * up`` or ``activation(y)``; then ``+ residual``. Kernels may round h in
one of two ways, of which the second is the nearer to h:

- *narrow*: in groups of 32 along K to int8, ``s = max|h| / 127``, ``rint(h / s)``; dot products are exact integers.
- *wide* (from ``wide_rows`` rows on, where the host has matrix units): to bf16, with weights rounded to bf16 or kept
  exact; sums in fp32.

A row's result does not depend on the other rows, nor on the number of threads: it changes only between narrow and wide.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

LINEAR: Final = "Linear"
EMBEDDING: Final = "Embedding"

STRIP: Final = 16
"""Output columns of a strip."""
K_ALIGNMENT: Final = 64
MAX_K: Final = 65_536
MAXIMA_BLOCK: Final = 64
ACTIVATION_GROUP: Final = 32
"""Elements of K that share a scale in narrow kernels."""


class LinearFormat(IntEnum):
    """Attribute ``format``: how weights are stored."""

    W4_DM = 0
    """4 bits, scale and minimum in groups of 32: llama.cpp's Q4_1 grid."""
    W4 = 1
    """4 bits, symmetric, groups of 32 or 64."""
    W8 = 2
    """8 bits, symmetric, groups of 32 or 64, or one scale a column."""


LINEAR_GROUPS: Final = {LinearFormat.W4_DM: (32,), LinearFormat.W4: (32, 64), LinearFormat.W8: (0, 32, 64)}
"""Groups that each format takes; 0: one scale a column."""


class Activation(IntEnum):
    """Attribute ``activation``."""

    NONE = 0
    SILU = 1
    GELU = 2
    """With erf."""
    GELU_TANH = 3
    RELU = 4


@dataclass(frozen=True, slots=True)
class LinearAttributes:
    """Attributes of ``castline::Linear``.

    Inputs, in order (float32 unless said; "" where absent):

    ==  ===========  ========================================================================
    0   x            [T, k]
    1   weight       uint8, 2-D: [strips, bytes of a strip]; strips = ceil(n / 16), twice that when gated
    2   scales       float16, 2-D: [strips, halves of a strip]
    3   norm_weight  [k]; absent when norm is 0
    4   bias         [n]; when gated [2, n], gate then up; may be absent
    5   residual     [T, n]; may be absent
    ==  ===========  ========================================================================

    Outputs, both float32: y [T, n]; and, where the node names it, the largest of each `MAXIMA_BLOCK` columns of a row,
    [T, ceil(n / MAXIMA_BLOCK)], with -infinity as the lowest finite number. Where a row holds a NaN or +infinity, one
    of its maxima at least is NaN. T may be 0. Shapes are checked: a wrong one is an error that names the tensor.
    """

    k: int
    n: int
    """Columns of the output."""
    format: int
    group: int
    activation: int = 0
    gated: int = 0
    norm: int = 0
    norm_eps: float = 1e-6
    wide_rows: int = 0
    """Rows from which the wide kernels are used; 0 lets the operator choose, -1 means never."""


@dataclass(frozen=True, slots=True)
class EmbeddingAttributes:
    """Attributes of ``castline::Embedding``: rows of a packed matrix W [n, k] as floats.

    Inputs: ids int64 [T] in 0 .. n - 1 (another id is an error), weight and scales as those of Linear. Output: [T, k]
    float32.
    """

    k: int
    n: int
    format: int
    group: int
