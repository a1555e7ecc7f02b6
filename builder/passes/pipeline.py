"""The order of the passes, and what each did."""

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from castline.builder.passes.attention import pack_attention
from castline.builder.passes.matmuls import merge_gate_up, merge_qkv
from castline.builder.passes.norms import fuse_rms_norm, fuse_skip_norm
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


PASSES: tuple[tuple[str, Callable[[ir.Model], int]], ...] = (
    ("dead code", remove_dead_code),
    ("weights by reference", transpose_weights),
    ("constant folding", fold_constants),
    ("RMSNorm", fuse_rms_norm),
    ("residual + RMSNorm", fuse_skip_norm),
    ("RoPE and QK-norm inside attention", pack_attention),
    ("RoPE as standard operators", expand_rope),
    ("QKV in one matmul", merge_qkv),
    ("gate and up in one matmul", merge_gate_up),
    ("logits of wanted rows", gather_rows),
    ("batch axis dropped", drop_batch_axis),
    ("rows taken after the last attention", take_rows_early),
    ("tied head shares the embedding", share_tied_head),
)


def run_passes(model: ir.Model) -> tuple[PassReport, ...]:
    """Runs every pass on *model*, in place."""
    reports = []
    for name, apply in PASSES:
        before = len(model.graph)
        matched = apply(model)
        remove_dead_code(model)
        reports.append(PassReport(name, before, len(model.graph), matched))
    return tuple(reports)
