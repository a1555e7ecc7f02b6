"""Serialised ONNX models of one Linear or Embedding node: tests, the self-test and the tuner run them."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from numpy.typing import NDArray

from castline.plugins.cpu.model_writer import FLOAT, FLOAT16, INT64, UINT8, ValueType, serialise_node
from castline.plugins.linear import (
    EMBEDDING,
    LINEAR,
    MAXIMA_BLOCK,
    STRIP,
    EmbeddingAttributes,
    LinearAttributes,
    LinearFormat,
)
from castline.plugins.linear_packing import PackedWeight, strip_shape
from castline.plugins.linear_reference import LinearInputs

X, WEIGHT, SCALES, NORM_WEIGHT, BIAS, RESIDUAL = "x", "weight", "scales", "norm_weight", "bias", "residual"
IDS: Final = "ids"


def serialise_linear_model(
    attributes: LinearAttributes, *, bias: bool = False, residual: bool = False, maxima: bool = False
) -> bytes:
    """A ModelProto whose graph is the one node; all its inputs are graph inputs, its outputs ``output`` and, with
    *maxima*, ``output.1``."""
    a = attributes
    strips, strip_bytes, halves = _packed_shape(a.k, a.n, a.format, a.group, gated=bool(a.gated))
    types: dict[str, ValueType] = {
        X: (FLOAT, ("T", a.k)),
        WEIGHT: (UINT8, (strips, strip_bytes)),
        SCALES: (FLOAT16, (strips, halves)),
        NORM_WEIGHT: (FLOAT, (a.k,)),
        BIAS: (FLOAT, (2, a.n) if a.gated else (a.n,)),
        RESIDUAL: (FLOAT, ("T", a.n)),
    }
    names = [X, WEIGHT, SCALES, NORM_WEIGHT if a.norm else "", BIAS if bias else "", RESIDUAL if residual else ""]
    shapes = [("T", a.n), ("T", -(-a.n // MAXIMA_BLOCK))]
    return serialise_node(LINEAR, asdict(a), names, types, *shapes[: 1 + maxima])


def serialise_embedding_model(attributes: EmbeddingAttributes) -> bytes:
    """A ModelProto whose graph is the one node; all its inputs are graph inputs, its output is ``output``."""
    a = attributes
    strips, strip_bytes, halves = _packed_shape(a.k, a.n, a.format, a.group)
    types: dict[str, ValueType] = {
        IDS: (INT64, ("T",)),
        WEIGHT: (UINT8, (strips, strip_bytes)),
        SCALES: (FLOAT16, (strips, halves)),
    }
    return serialise_node(EMBEDDING, asdict(a), [IDS, WEIGHT, SCALES], types, ("T", a.k))


def linear_feeds(inputs: LinearInputs, packed: PackedWeight) -> Mapping[str, NDArray[Any]]:
    """Every input of the node that is there, by the name of its graph input."""
    feeds: dict[str, NDArray[Any] | None] = {
        X: inputs.x,
        WEIGHT: packed.weight,
        SCALES: packed.scales,
        NORM_WEIGHT: inputs.norm_weight,
        BIAS: inputs.bias,
        RESIDUAL: inputs.residual,
    }
    return {name: array for name, array in feeds.items() if array is not None}


def _packed_shape(k: int, n: int, fmt: int, group: int, *, gated: bool = False) -> tuple[int, int, int]:
    return (-(-n // STRIP) * (2 if gated else 1), *strip_shape(k, LinearFormat(fmt), group))
