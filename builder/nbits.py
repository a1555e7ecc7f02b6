"""Weight-only quantisation with ONNX Runtime's own operators: the alternative to castline::Linear.

``x @ W`` becomes ``MatMulNBits``: W in groups of *block* elements along K, a float scale each, unsigned integers of 8
or 4 bits whose zero is the middle (symmetric kernels) or stored for each group. A tied embedding keeps one copy of its
bytes: the head's MatMulNBits and the embedding's ``GatherBlockQuantized`` read the same place of the weights file.

Weights are packed when the file is written, one tensor at a time. A float zero point would reproduce llama.cpp's
Q4_1 grid (d, m) exactly, but MatMulNBits then expands W to fp32 at every call: 60 times slower at one token.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from castline.builder.lookups import lookups_in
from castline.builder.lower import SAME_BYTES_AS
from castline.builder.matmuls import Matmul
from castline.builder.passes.norms import MS
from castline.builder.passes.walk import add_constant, add_initializer, make, replace
from castline.builder.recipes import MatmulKernel


@dataclass(frozen=True, slots=True)
class Packed:
    """W [N, K] in groups along K. Groups past K are padded with zeros."""

    values: NDArray[np.uint8]
    """[N, groups, block * bits / 8]; two 4-bit values a byte, the first in the low half."""
    scales: NDArray[np.float32]
    """[N, groups]"""
    zero_points: NDArray[np.uint8]
    """[N, groups], or [N, ceil(groups / 2)] packed as the values are."""


def pack(weight: NDArray[np.float32], bits: int, block: int, *, symmetric: bool) -> Packed:
    """Rounds W [N, K] to *bits* in groups of *block*: ``w ~ (value - zero_point) * scale``."""
    n, k = weight.shape
    groups = -(-k // block)
    if groups * block != k:
        weight = np.pad(weight, ((0, 0), (0, groups * block - k)))
    w = np.ascontiguousarray(weight).reshape(n, groups, block)
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    if symmetric:
        scales = _symmetric_scales(w, bits)
        zeros = np.full((n, groups), middle, np.uint8)
    else:
        low, high = np.minimum(w.min(-1), 0), np.maximum(w.max(-1), 0)
        scales = _nonzero((high - low) / top)
        zeros = np.clip(np.rint(-low / scales), 0, top).astype(np.uint8)
    values = np.rint(w / scales[..., None])
    values += zeros[..., None]
    packed = np.clip(values, 0, top, out=values).astype(np.uint8)
    if bits == 4:
        return Packed(_nibbles(packed), scales, _nibbles(zeros))
    return Packed(packed, scales, zeros)


def _symmetric_scales(w: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """8 bits: the largest magnitude becomes ±127. 4 bits have one more negative level than positive ones, and the
    largest magnitude takes it, whichever its sign (as llama.cpp's Q4_0)."""
    if bits == 8:
        return _nonzero(np.abs(w).max(-1) / 127)
    index = np.abs(w).argmax(-1)[..., None]
    return _nonzero(np.take_along_axis(w, index, -1)[..., 0] / -(1 << (bits - 1)))


def _nonzero(scales: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    return np.where(scales == 0, 1, scales).astype(np.float32)


def _nibbles(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two 4-bit values a byte along the last axis."""
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros((*values.shape[:-1], 1), np.uint8)], -1)
    packed: NDArray[np.uint8] = values[..., ::2] | (values[..., 1::2] << np.uint8(4))
    return packed


class _LazyPack:
    """Packs one weight when one of its tensors is read; the last is kept, for its tensors are written in a row."""

    def __init__(self, matmul: Matmul, kernel: MatmulKernel) -> None:
        self.read = matmul.reader()
        self.kernel = kernel
        self.k, self.n = matmul.shape
        self.groups = -(-self.k // kernel.block)

    def lazy(self, name: str, field: str, shape: tuple[int, ...], **metadata: str) -> ir.LazyTensor:
        kind = ir.DataType.FLOAT if field == "scales" else ir.DataType.UINT8

        def read() -> ir.TensorProtocol:
            return ir.tensor(getattr(_packed(self), field).reshape(shape))

        return ir.LazyTensor(read, kind, ir.Shape(shape), name=name, metadata_props=metadata)

    @property
    def group_bytes(self) -> int:
        return self.kernel.block * self.kernel.bits // 8

    @property
    def zero_bytes(self) -> int:
        return self.groups if self.kernel.bits == 8 else -(-self.groups // 2)


@lru_cache(maxsize=1)
def _packed(source: _LazyPack) -> Packed:
    kernel = source.kernel
    return pack(source.read(), kernel.bits, kernel.block, symmetric=kernel.symmetric)


def replace_matmul(model: ir.Model, matmul: Matmul, kernel: MatmulKernel) -> None:
    """Puts a MatMulNBits in place of *matmul*, and reads lookups in the same matrix from its bytes."""
    source = _LazyPack(matmul, kernel)
    weight = matmul.weight
    base = f"{matmul.name}.q{kernel.bits}"
    values = add_initializer(model, base, source.lazy(base, "values", (source.n, source.groups, source.group_bytes)))
    operands = [values, _operand(model, source, f"{base}.scales", "scales", source.groups)]
    if not kernel.symmetric:
        operands.append(_operand(model, source, f"{base}.zero_points", "zero_points", source.zero_bytes))
    node = make(
        "MatMulNBits",
        [matmul.x, *operands],
        domain=MS,
        like=matmul.y,
        K=source.k,
        N=source.n,
        bits=kernel.bits,
        block_size=kernel.block,
        accuracy_level=kernel.accuracy_level,
    )
    model.graph.insert_before(matmul.node, node)
    replace(matmul.y, node.outputs[0])
    model.graph.remove(matmul.node, safe=True)
    model.opset_imports.setdefault(MS, 1)
    for lookup in lookups_in(weight):
        _share_embedding(model, lookup, source, operands)


def _operand(model: ir.Model, source: _LazyPack, name: str, field: str, width: int) -> ir.Value:
    return add_initializer(model, name, source.lazy(name, field, (source.n, width)))


def _share_embedding(model: ir.Model, gather: ir.Node, source: _LazyPack, operands: list[ir.Value]) -> None:
    """Reads the rows of a tied embedding from the head's bytes, as [N, groups * bytes of a group]."""
    values = operands[0]
    name = f"{values.name}.rows"
    shape = (source.n, source.groups * source.group_bytes)
    rows = add_initializer(model, name, source.lazy(name, "values", shape, **{SAME_BYTES_AS: str(values.name)}))
    lookup = make(
        "GatherBlockQuantized",
        [rows, gather.inputs[1], *operands[1:]],
        domain=MS,
        like=gather.outputs[0],
        bits=source.kernel.bits,
        block_size=source.kernel.block,
        gather_axis=0,
        quantize_axis=1,
    )
    model.graph.insert_before(gather, lookup)
    found = lookup.outputs[0]
    if source.groups * source.kernel.block != source.k:
        bounds = [add_constant(model, f"slice.{i}", np.array([i])) for i in (0, source.k, -1)]
        unpadded = make("Slice", [found, *bounds], like=gather.outputs[0])
        model.graph.insert_before(gather, unpadded)
        found.shape = None
        found = unpadded.outputs[0]
    replace(gather.outputs[0], found)
    model.graph.remove(gather, safe=True)
