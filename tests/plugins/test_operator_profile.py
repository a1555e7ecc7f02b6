"""ONNX Runtime's profile as runs and roles, from made-up files."""

import json
from pathlib import Path
from typing import Any

from castline.plugins.cpu.operator_profile import Role, read_profile

VOCAB, HIDDEN, QKV, HEADS, FFN = 1000, 64, 128, 96, 160


def node(ts: int, op: str, columns_in: int, columns_out: int) -> dict[str, Any]:
    args = {
        "op_name": op,
        "provider": "CPUExecutionProvider",
        "input_type_shape": [{"float": [2, columns_in]}, {"uint8": [7, 9]}],
        "output_type_shape": [{"float": [2, columns_out]}],
    }
    return {"cat": "Node", "name": f"{op}_{ts % 1000}_kernel_time", "ts": ts, "dur": 3, "ph": "X", "args": args}


def events(layers: list[tuple[str, int, int]], ts: int) -> list[dict[str, Any]]:
    """A run of nodes, 5 µs apart."""
    nodes = [node(ts + 5 * place, *layer) for place, layer in enumerate(layers, start=1)]
    length = 5 * len(layers) + 10
    return [{"cat": "Session", "name": "model_run", "ts": ts, "dur": length, "ph": "X", "args": {}}, *nodes]


def roles(tmp_path: Path, layers: list[tuple[str, int, int]]) -> list[Role]:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(events(layers, 1000)))
    (run,) = read_profile(path, 0, VOCAB)
    return [operator.role for operator in run.operators]


ATTENTION = ("PagedAttention", QKV, HEADS)
LAYER = [
    ("SimplifiedLayerNormalization", HIDDEN, HIDDEN),
    ("Linear", HIDDEN, QKV),
    ATTENTION,
    ("Linear", HEADS, HIDDEN),
    ("Linear", HIDDEN, FFN),
    ("Mul", FFN, FFN),
    ("Linear", FFN, HIDDEN),
]
LAYER_ROLES = [Role.NORM, Role.QKV, Role.ATTENTION, Role.OUT, Role.GATE_UP, Role.OTHER, Role.DOWN]


def test_roles_of_a_decoder(tmp_path: Path) -> None:
    """Node names carry no role, so a wrong rule puts the time of one matmul on another."""
    layers = [("GatherBlockQuantized", 1, HIDDEN), *LAYER, *LAYER, ("MatMulNBits", HIDDEN, VOCAB)]
    assert roles(tmp_path, layers) == [Role.EMBEDDING, *LAYER_ROLES, *LAYER_ROLES, Role.HEAD]


def test_roles_where_attention_and_mlp_are_parallel(tmp_path: Path) -> None:
    """phi and gpt-j: the MLP's matmuls may run before the attention, or between it and its output projection."""
    layer = [
        ("Linear", HIDDEN, FFN),
        ("Linear", HIDDEN, QKV),
        ("Linear", FFN, HIDDEN),
        ATTENTION,
        ("Linear", HEADS, HIDDEN),
    ]
    expected = [Role.GATE_UP, Role.QKV, Role.DOWN, Role.ATTENTION, Role.OUT]
    assert roles(tmp_path, layer * 2) == expected * 2


def test_runs_have_their_own_nodes_and_the_callers_clock(tmp_path: Path) -> None:
    """A node in the wrong run, or times on the profile's own clock, would lie outside their step in the trace."""
    path = tmp_path / "profile.json"
    loading = {"cat": "Session", "name": "session_initialization", "ts": 1, "dur": 9, "ph": "X", "args": {}}
    path.write_text(json.dumps([loading, *events(LAYER, 1000), *events(LAYER[:3], 2000)]))
    first, second = read_profile(path, 50_000, VOCAB)
    assert (first.start_ns, first.duration_ns) == (1_050_000, 45_000)
    assert [operator.start_ns for operator in second.operators] == [2_055_000, 2_060_000, 2_065_000]
    assert (len(first.operators), first.operators[0].name) == (7, "SimplifiedLayerNormalization_5")
