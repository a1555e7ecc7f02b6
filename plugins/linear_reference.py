"""`castline.plugins.linear` in plain NumPy: what every implementation of Linear and Embedding is compared with."""

from collections.abc import Callable
from dataclasses import dataclass
from math import erf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from castline.plugins.linear import ACTIVATION_GROUP, Activation, EmbeddingAttributes, LinearAttributes, LinearFormat
from castline.plugins.linear_packing import PackedWeight, padded_k, unpack, unpack_gated

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

_INT8_MAX: Final = np.float32(127)
_SMALLEST: Final = np.float32(1e-36)
"""A group with no greater magnitude becomes zeros: the inverse of its scale would overflow."""


@dataclass(frozen=True, slots=True)
class LinearInputs:
    """Inputs of one Linear node but for the packed weights; see `LinearAttributes` for shapes."""

    x: Floats
    norm_weight: Floats | None = None
    bias: Floats | None = None
    residual: Floats | None = None


def linear(attributes: LinearAttributes, inputs: LinearInputs, packed: PackedWeight, *, wide: bool = False) -> Floats:
    """One call of the node, [T, n]: h is rounded as narrow or as wide kernels round it, the rest is in float64.

    Wide kernels may round weights to bf16 or not; here they do not.
    """
    a = attributes
    h = normed(a, inputs)
    rounded = round_bf16(h).astype(np.float64) if wide else round_groups(h)
    fmt = LinearFormat(a.format)
    if not a.gated:
        y = activate(a.activation, _product(rounded, unpack(packed, a.n, a.k, fmt, a.group), inputs.bias))
    else:
        gate, up = unpack_gated(packed, a.n, a.k, fmt, a.group)
        gate_bias, up_bias = (None, None) if inputs.bias is None else inputs.bias
        y = activate(a.activation, _product(rounded, gate, gate_bias)) * _product(rounded, up, up_bias)
    if inputs.residual is not None:
        y = y + inputs.residual
    return y.astype(np.float32)


def embedding(attributes: EmbeddingAttributes, ids: NDArray[np.int64], packed: PackedWeight) -> Floats:
    """One call of the Embedding node, [T, k]."""
    a = attributes
    return unpack(packed, a.n, a.k, LinearFormat(a.format), a.group)[ids]


def normed(a: LinearAttributes, inputs: LinearInputs) -> Floats:
    """h [T, k]: the mean square is taken in float64, the rest in float32."""
    x = inputs.x
    if not a.norm:
        return x
    assert inputs.norm_weight is not None
    mean_square = np.square(x, dtype=np.float64).sum(axis=1, keepdims=True) / a.k
    factor = (1.0 / np.sqrt(mean_square + np.float64(np.float32(a.norm_eps)))).astype(np.float32)
    h: Floats = x * factor * inputs.norm_weight
    return h


def round_groups(h: Floats) -> Doubles:
    """h [T, k] as int8 in groups of 32 gives it back."""
    rows, k = h.shape
    groups = np.pad(h, ((0, 0), (0, padded_k(k) - k))).reshape(rows, padded_k(k) // ACTIVATION_GROUP, ACTIVATION_GROUP)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    inverse = np.divide(_INT8_MAX, largest, out=np.zeros_like(largest), where=largest > _SMALLEST)
    scale = (largest / _INT8_MAX).astype(np.float64)
    back: Doubles = (np.rint(groups * inverse) * scale).reshape(rows, padded_k(k))[:, :k]
    return back


def round_bf16(x: Floats) -> Floats:
    """To nearest, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    back: Floats = rounded.view(np.float32)
    return back


def activate(activation: int, x: Doubles) -> Doubles:
    y: Doubles = _ACTIVATIONS[Activation(activation)](x)
    return y


def _product(h: Doubles, weight: Floats, bias: Floats | None) -> Doubles:
    y: Doubles = h @ weight.T.astype(np.float64)
    return y if bias is None else y + bias


def _sigmoid(x: Doubles) -> Doubles:
    e = np.exp(-np.abs(x))
    y: Doubles = np.where(x > 0, 1.0, e) / (1.0 + e)
    return y


def _gelu_tanh(x: Doubles) -> Doubles:
    y: Doubles = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return y


_ACTIVATIONS: Final[dict[Activation, Callable[[Any], Any]]] = {
    Activation.NONE: lambda x: x,
    Activation.SILU: lambda x: x * _sigmoid(x),
    Activation.GELU: lambda x: 0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x / np.sqrt(2))),
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU: lambda x: np.maximum(x, 0),
}
