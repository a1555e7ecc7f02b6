"""The order of the passes, and what each did."""

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from castline.builder.passes.activations import fuse_gelu_tanh
from castline.builder.passes.attention import pack_attention
from castline.builder.passes.matmuls import merge_gate_up, merge_qkv, split_gemm
from castline.builder.passes.norms import fuse_rms_norm
from castline.builder.passes.positions import tabulate_positions
from castline.builder.passes.rope import expand_rope
from castline.builder.passes.rows import drop_batch_axis, gather_rows, share_tied_head, take_rows_early
from castline.builder.passes.weights import fold_constants, remove_dead_code, transpose_weights


@dataclass(frozen=True, slots=True)
class PassReport:
    """One pass: nodes of the graph before and after, and how often it matched."""

    name: str
    before: int
    after: int
    matched: int


def _passes(max_positions: int) -> tuple[tuple[str, Callable[[ir.Model], int]], ...]:
    return (
        ("dead code", remove_dead_code),
        ("weights by reference", transpose_weights),
        ("constant folding", fold_constants),
        ("Gemm as MatMul and bias", split_gemm),
        ("GELU", fuse_gelu_tanh),
        ("RMSNorm", fuse_rms_norm),
        ("RoPE and QK-norm inside attention", pack_attention),
        ("RoPE as standard operators", expand_rope),
        ("functions of positions as tables", lambda model: tabulate_positions(model, max_positions)),
        ("QKV in one matmul", merge_qkv),
        ("gate and up in one matmul", merge_gate_up),
        ("logits of wanted rows", gather_rows),
        ("batch axis dropped", drop_batch_axis),
        ("rows taken after the last attention", take_rows_early),
        ("tied head shares the embedding", share_tied_head),
    )


def run_pass(model: ir.Model, name: str, apply: Callable[[ir.Model], int]) -> PassReport:
    """Runs one pass on *model*, in place, and drops what nothing needs after it."""
    before = len(model.graph)
    matched = apply(model)
    remove_dead_code(model)
    return PassReport(name, before, len(model.graph), matched)


def run_passes(model: ir.Model, max_positions: int) -> tuple[PassReport, ...]:
    """Runs every pass on *model*, in place, for sequences of up to *max_positions* tokens."""
    return tuple(run_pass(model, name, apply) for name, apply in _passes(max_positions))
