"""Serialised ONNX models of one node, written without the onnx package, which serving does not have.

Only the few protobuf fields needed are known here; their numbers are those of onnx.proto.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from castline.plugins.contract import DOMAIN, OPSET_VERSION

OUTPUT: Final = "output"
SECOND_OUTPUT: Final = "output.1"

FLOAT, UINT8, INT32, INT64, FLOAT16 = 1, 2, 6, 7, 10
"""Element types."""

ValueType = tuple[int, tuple[str | int, ...]]
"""Element type and shape; a string is a size that a call decides."""

_IR_VERSION: Final = 10
_ONNX_OPSET: Final = 21
_ATTRIBUTE_FLOAT, _ATTRIBUTE_INT = 1, 2


def serialise_node(
    op_type: str,
    attributes: Mapping[str, float],
    inputs: Sequence[str],
    types: Mapping[str, ValueType],
    *output_shapes: Iterable[str | int],
) -> bytes:
    """A ModelProto whose graph is one castline node, with the float outputs ``output`` and ``output.1``, as many as
    there are shapes.

    *inputs* names the graph input of each node input, "" where the node has none; *types* may know more names.
    """
    node = [_string(1, name) for name in inputs]
    outputs = dict(zip((OUTPUT, SECOND_OUTPUT), output_shapes, strict=False))
    node += [_string(2, name) for name in outputs]
    node += [_string(3, op_type), _string(4, op_type)]
    node += [_message(5, _attribute(name, value)) for name, value in attributes.items()]
    node.append(_string(7, DOMAIN))
    graph = [_message(1, node), _string(2, op_type)]
    graph += [_message(11, _value_info(name, *types[name])) for name in inputs if name]
    graph += [_message(12, _value_info(name, FLOAT, shape)) for name, shape in outputs.items()]
    model = [_varint(1, _IR_VERSION), _message(7, graph)]
    for domain, version in (("", _ONNX_OPSET), (DOMAIN, OPSET_VERSION)):
        model.append(_message(8, [_string(1, domain), _varint(2, version)]))
    return b"".join(model)


def _attribute(name: str, value: float) -> list[bytes]:
    if isinstance(value, float):
        return [_string(1, name), _key(2, 5) + np.float32(value).tobytes(), _varint(20, _ATTRIBUTE_FLOAT)]
    return [_string(1, name), _varint(3, int(value)), _varint(20, _ATTRIBUTE_INT)]


def _value_info(name: str, element: int, shape: Iterable[str | int]) -> list[bytes]:
    dims = [_message(1, [_varint(1, d) if isinstance(d, int) else _string(2, d)]) for d in shape]
    tensor = _message(1, [_varint(1, element), _message(2, dims)])
    return [_string(1, name), _message(2, [tensor])]


def _unsigned(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(number: int, wire_type: int) -> bytes:
    return _unsigned(number << 3 | wire_type)


def _varint(number: int, value: int) -> bytes:
    return _key(number, 0) + _unsigned(value & 0xFFFFFFFFFFFFFFFF)


def _message(number: int, parts: Iterable[bytes]) -> bytes:
    body = b"".join(parts)
    return _key(number, 2) + _unsigned(len(body)) + body


def _string(number: int, text: str) -> bytes:
    return _message(number, [text.encode()])
