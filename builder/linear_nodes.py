"""Matmuls become castline::Linear nodes, and lookups of tokens castline::Embedding nodes: a tied embedding reads the
head's bytes, another is packed for itself.

Weights are packed when the file is written, one matrix at a time.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from dataclasses import replace as replace_fields
from functools import lru_cache
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from castline.builder.linear_sites import Site
from castline.builder.lookups import lookups_in
from castline.builder.passes.walk import (
    add_constant,
    add_initializer,
    attribute,
    make,
    remove_unused,
    replace,
    sizes,
)
from castline.builder.recipes import MatmulKernel
from castline.engines.errors import BuildError
from castline.plugins.contract import DOMAIN
from castline.plugins.linear import (
    EMBEDDING,
    LINEAR,
    STRIP,
    EmbeddingAttributes,
    LinearAttributes,
    LinearFormat,
)
from castline.plugins.linear_packing import PackedWeight, UnpackableError, pack, pack_gated, strip_shape


def replace_site(model: ir.Model, site: Site, kernel: MatmulKernel) -> None:
    """Puts a Linear node in place of *site*, and an Embedding in place of lookups in the same matrix."""
    matmul, gate_first = site.matmul, site.gate_first if site.gated else None
    source = _LazyPack(matmul.name, matmul.reader(), matmul.shape[0], site.n, kernel, gate_first)
    weight, scales = source.initializers(model)
    matrix, before = matmul.weight, site.last
    bias = _bias(model, site) if site.bias is not None else None
    norm_weight = site.norm.inputs[1] if site.norm else None
    inputs = [_rows(model, site.x, before), weight, scales, norm_weight, bias]
    inputs.append(None if site.residual is None else _rows(model, site.residual, before))
    while inputs[-1] is None:
        inputs.pop()
    node = make(LINEAR, inputs, domain=DOMAIN, like=site.out, **asdict(_attributes(site, kernel)))
    model.graph.insert_before(before, node)
    _replace_rows(model, site.out, node.outputs[0], before)
    remove_unused(model, before)
    for lookup in lookups_in(matrix):
        _replace_lookup(model, lookup, weight, scales, source)


def replace_table(model: ir.Model, table: ir.Value, kernel: MatmulKernel) -> None:
    """Puts an Embedding in place of every lookup in *table*, which nothing else reads."""
    tensor = table.const_value
    assert tensor is not None
    n, k = sizes(tensor)
    source = _LazyPack(str(table.name), tensor.numpy, k, n, kernel)
    weight, scales = source.initializers(model)
    for lookup in lookups_in(table):
        _replace_lookup(model, lookup, weight, scales, source)


def _attributes(site: Site, kernel: MatmulKernel) -> LinearAttributes:
    assert kernel.format is not None
    attributes = LinearAttributes(
        k=site.matmul.shape[0],
        n=site.n,
        format=int(kernel.format),
        group=kernel.block,
        activation=int(site.activation),
        gated=int(site.gated),
        wide_rows=kernel.wide_rows,
    )
    if site.norm is None:
        return attributes
    return replace_fields(attributes, norm=1, norm_eps=float(attribute(site.norm, "epsilon")))


@dataclass(frozen=True, slots=True, eq=False)
class _LazyPack:
    """Packs one weight when one of its two tensors is read; the last is kept, for they are written in a row."""

    weight_name: str
    read: Callable[[], NDArray[Any]]
    """W [n, k]; gated [2n, k]."""
    k: int
    n: int
    kernel: MatmulKernel
    gate_first: bool | None = None
    """Gated: whether the gate is the first half of W's rows. None where there is no gate."""

    @property
    def name(self) -> str:
        return f"{self.weight_name}.{self.kernel.name.removeprefix('linear-')}"

    @property
    def format(self) -> LinearFormat:
        assert self.kernel.format is not None
        return self.kernel.format

    @property
    def group(self) -> int:
        return self.kernel.block

    def initializers(self, model: ir.Model) -> tuple[ir.Value, ir.Value]:
        """(weight, scales)."""
        strips = -(-self.n // STRIP) * (1 if self.gate_first is None else 2)
        strip_bytes, halves = strip_shape(self.k, self.format, self.group)
        weight = self._lazy(self.name, "weight", ir.DataType.UINT8, (strips, strip_bytes))
        scales = self._lazy(f"{self.name}.scales", "scales", ir.DataType.FLOAT16, (strips, halves))
        return add_initializer(model, self.name, weight), add_initializer(model, f"{self.name}.scales", scales)

    def _lazy(self, name: str, field: str, kind: ir.DataType, shape: tuple[int, int]) -> ir.LazyTensor:
        return ir.LazyTensor(lambda: ir.tensor(getattr(_packed(self), field)), kind, ir.Shape(shape), name=name)


@lru_cache(maxsize=1)
def _packed(source: _LazyPack) -> PackedWeight:
    rows = source.read()
    try:
        if source.gate_first is None:
            return pack(rows, source.format, source.group)
        return pack_gated(*_gate_then_up(rows, source.gate_first), source.format, source.group)
    except UnpackableError as error:
        raise BuildError(
            f"compile: {source.weight_name}: {error}; take --recipe fp32, which stores weights as they are"
        ) from None


def _gate_then_up(columns: NDArray[Any], gate_first: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    first, second = np.split(columns, 2)
    return (first, second) if gate_first else (second, first)


def _bias(model: ir.Model, site: Site) -> ir.Value | None:
    if site.bias is None or not site.gated:
        return site.bias
    tensor, name = site.bias.const_value, f"{site.bias.name}.gated"
    assert tensor is not None

    def read() -> ir.TensorProtocol:
        return ir.tensor(np.stack(_gate_then_up(tensor.numpy(), site.gate_first)))

    return add_initializer(model, name, ir.LazyTensor(read, tensor.dtype, ir.Shape((2, site.n)), name=name))


def _rows(model: ir.Model, value: ir.Value, before: ir.Node) -> ir.Value:
    """*value* as [T, width]."""
    assert value.shape is not None
    if len(value.shape) == 2:
        return value
    width = int(value.shape[-1])  # type: ignore[arg-type]
    reshape = make("Reshape", [value, add_constant(model, f"shape.rows.{width}", np.array([-1, width]))])
    model.graph.insert_before(before, reshape)
    return reshape.outputs[0]


def _replace_rows(model: ir.Model, old: ir.Value, new: ir.Value, before: ir.Node) -> None:
    """*new* is [T, width]; *old* may be [1, T, width]."""
    if old.shape is not None and len(old.shape) == 3:
        new.shape = ir.Shape(old.shape[1:])
        unsqueeze = make("Unsqueeze", [new, add_constant(model, "axes.0", np.array([0]))], like=old)
        model.graph.insert_before(before, unsqueeze)
        new = unsqueeze.outputs[0]
    replace(old, new)


def _replace_lookup(model: ir.Model, gather: ir.Node, weight: ir.Value, scales: ir.Value, source: _LazyPack) -> None:
    ids, rank = gather.inputs[1], len(gather.outputs[0].shape or ())
    if rank == 3:
        flat = make("Reshape", [ids, add_constant(model, "shape.flat", np.array([-1]))])
        model.graph.insert_before(gather, flat)
        ids = flat.outputs[0]
    facts = EmbeddingAttributes(source.k, source.n, int(source.format), source.group)
    node = make(EMBEDDING, [ids, weight, scales], domain=DOMAIN, like=gather.outputs[0], **asdict(facts))
    model.graph.insert_before(gather, node)
    _replace_rows(model, gather.outputs[0], node.outputs[0], gather)
    model.graph.remove(gather, safe=True)
