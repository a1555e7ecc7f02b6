"""ONNX Runtime's profile of a session as runs of operators, each with its role in a decoder.

Roles are found by structure, for node names carry none: qkv is the last matmul before an attention node whose output
is as wide as the attention's input; o the first one after it that takes the attention's output; the output head gives
the graph's last matmul with vocab_size columns; of the others, those that give back o's width are down-projections.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from castline.plugins.contract import PAGED_ATTENTION

_NODE_SUFFIX = "_kernel_time"
_RUN = "model_run"
_EMBEDDINGS = ("Gather", "Embedding")


class Role(StrEnum):
    EMBEDDING = "embedding"
    NORM = "norm"
    QKV = "qkv"
    ATTENTION = "attention"
    OUT = "o"
    """The attention's output projection."""
    GATE_UP = "gate/up"
    DOWN = "down"
    HEAD = "head"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Operator:
    """One node of one run. Times in nanoseconds on `perf_counter_ns`'s clock, with a resolution of microseconds."""

    name: str
    op_type: str
    role: Role
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class OperatorRun:
    """One forward pass."""

    start_ns: int
    duration_ns: int
    operators: tuple[Operator, ...]


class _Args(msgspec.Struct):
    op_name: str = ""
    input_type_shape: list[dict[str, list[int]]] = []
    output_type_shape: list[dict[str, list[int]]] = []


class _Event(msgspec.Struct):
    """Times in microseconds since the profile's start."""

    cat: str
    name: str
    ts: int
    dur: int
    args: _Args


def read_profile(path: Path, start_ns: int, vocab_size: int) -> list[OperatorRun]:
    """Complete runs of the profile that ONNX Runtime wrote to *path*; it was started at *start_ns*."""
    events = msgspec.json.decode(path.read_bytes(), type=list[_Event])
    runs = sorted((e for e in events if e.name == _RUN), key=lambda e: e.ts)
    nodes = sorted((e for e in events if e.cat == "Node" and e.name.endswith(_NODE_SUFFIX)), key=lambda e: e.ts)
    roles: dict[str, Role] = {}
    result: list[OperatorRun] = []
    position = 0
    for run in runs:
        while position < len(nodes) and nodes[position].ts < run.ts:
            position += 1
        first = position
        while position < len(nodes) and nodes[position].ts + nodes[position].dur <= run.ts + run.dur:
            position += 1
        inside = nodes[first:position]
        if not all(node.name in roles for node in inside):
            roles = dict(zip((node.name for node in inside), _roles(inside, vocab_size), strict=True))
        operators = (
            Operator(n.name.removesuffix(_NODE_SUFFIX), n.args.op_name, roles[n.name], *_times(n, start_ns))
            for n in inside
        )
        result.append(OperatorRun(*_times(run, start_ns), tuple(operators)))
    return result


def _times(event: _Event, start_ns: int) -> tuple[int, int]:
    return start_ns + event.ts * 1000, event.dur * 1000


def _roles(nodes: Sequence[_Event], vocab_size: int) -> list[Role]:
    """Of one run's nodes, in the order of execution."""
    roles = [_role_by_type(node.args.op_name) for node in nodes]
    matmuls = [place for place, role in enumerate(roles) if role is None]
    hidden = 0
    for place, role in enumerate(roles):
        if role is not Role.ATTENTION:
            continue
        width_in, width_out = _width(nodes[place].args.input_type_shape), _width(nodes[place].args.output_type_shape)
        before = (m for m in reversed(matmuls) if m < place and _columns(nodes[m]) == width_in)
        after = (m for m in matmuls if m > place and _width(nodes[m].args.input_type_shape) == width_out)
        if (qkv := next(before, None)) is not None and roles[qkv] is None:
            roles[qkv] = Role.QKV
        if (out := next(after, None)) is not None and roles[out] is None:
            roles[out] = Role.OUT
            hidden = _columns(nodes[out])
    if matmuls and _columns(nodes[matmuls[-1]]) == vocab_size:
        roles[matmuls[-1]] = Role.HEAD
    return [
        role or (Role.DOWN if _columns(nodes[place]) == hidden else Role.GATE_UP) for place, role in enumerate(roles)
    ]


def _role_by_type(op_type: str) -> Role | None:
    """None for a matmul, whose role is in its place."""
    if op_type == PAGED_ATTENTION:
        return Role.ATTENTION
    if "Norm" in op_type:
        return Role.NORM
    if op_type.startswith(_EMBEDDINGS):
        return Role.EMBEDDING
    return None if "MatMul" in op_type or op_type in ("Linear", "Gemm") else Role.OTHER


def _width(shapes: Sequence[Mapping[str, Sequence[int]]]) -> int:
    """Columns of the first tensor; 0 for a scalar or none."""
    for shape in shapes[:1]:
        for dims in shape.values():
            return dims[-1] if dims else 0
    return 0


def _columns(node: _Event) -> int:
    return _width(node.args.output_type_shape)
