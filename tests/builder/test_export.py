"""Export and lowering: the graph's interface, and that neither the model nor the modelling code is altered by them."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from castline.builder import export
from castline.builder.attention import RopeStyle, attention, half_table, rope
from castline.builder.checkpoint import Checkpoint, load_checkpoint
from castline.builder.export import export_model
from castline.builder.lower import lower_cpu, save_graph
from castline.builder.passes import run_passes
from castline.builder.probe import rope_style
from castline.engines.capacity import kv_block_bytes
from castline.engines.errors import BuildError


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., Path]) -> Checkpoint:
    return load_checkpoint(str(tiny_checkpoint("llama")))


@pytest.fixture(scope="module")
def exported(checkpoint: Checkpoint) -> ir.Model:
    return export_model(checkpoint)


def test_interface(exported: ir.Model) -> None:
    """The contract's names and nothing more; packed tokens, no batch, no mask."""
    assert [(v.name, str(v.shape)) for v in exported.graph.inputs] == [
        ("input_ids", "[T]"),
        ("positions", "[T]"),
        ("logits_indices", "[R]"),
    ]
    assert [(v.name, str(v.shape)) for v in exported.graph.outputs] == [("logits", "[R,272]")]
    ours = [n for n in exported.graph if n.domain == "castline"]
    assert [n.attributes["layer"].as_int() for n in ours if n.op_type == "Attention"] == [0, 1]
    assert sum(n.op_type == "Rope" for n in ours) == 4


def test_weights_are_the_model_s_own(exported: ir.Model, checkpoint: Checkpoint) -> None:
    """C04: a second copy of the weights doubles the memory of a build."""
    pointers = {p.data_ptr() for p in checkpoint.model.parameters() if p.ndim == 2}
    found = {
        v.const_value.raw.data_ptr()  # type: ignore[union-attr]
        for v in exported.graph.initializers.values()
        if v.const_value is not None and len(v.const_value.shape) == 2
    }
    assert found == pointers


def test_export_alters_nothing(checkpoint: Checkpoint) -> None:
    """The parity check runs the same model afterwards: with our stub in it, it would compare us with ourselves."""
    model: Any = checkpoint.model
    module = sys.modules[type(model).__module__]
    original, implementation = module.apply_rotary_pos_emb, model.config._attn_implementation
    weights = {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()}
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        before = model(ids).logits
        export_model(checkpoint)
        after = model(ids).logits
    assert torch.equal(before, after)
    assert module.apply_rotary_pos_emb is original
    assert model.config._attn_implementation == implementation
    assert {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()} == weights


def test_a_failed_export_restores_the_model(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names stage and architecture; the patches are gone."""
    module = sys.modules[type(checkpoint.model).__module__]
    original = module.apply_rotary_pos_emb

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("unsupported operator\nand a page of traces")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(BuildError, match=r"export: torch cannot export llama: unsupported operator$"):
        export_model(checkpoint)
    assert module.apply_rotary_pos_emb is original
    assert checkpoint.model.config._attn_implementation != "castline"


def test_export_is_quiet(checkpoint: Checkpoint, capfd: pytest.CaptureFixture[str]) -> None:
    """The exporter's remarks are about its own affairs and would bury the build's one line a stage."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export_model(checkpoint)
    assert capfd.readouterr() == ("", "")
    assert not caught


def test_a_graph_without_all_its_attention_is_refused(checkpoint: Checkpoint, exported: ir.Model) -> None:
    """A layer that bypassed the interface would have no KV cache, and answer as if each token were the first."""
    with pytest.raises(BuildError, match="2 attention nodes for 3 layers"):
        export._check(exported, 3)


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8", "fp8"])
def test_lowering_follows_the_contract(exported: ir.Model, kv_dtype: Any) -> None:
    """Inputs by the contract's names, order and types; lowering again replaces what was chosen."""
    model = exported.clone()
    run_passes(model, 256)
    lower_cpu(model, kv_dtype="fp32", block_size=64)
    lower_cpu(model, kv_dtype=kv_dtype, block_size=16, query_tile=8, kv_split=256)
    assert [v.name for v in model.graph.inputs] == [
        "input_ids",
        "positions",
        "slot_mapping",
        "cu_query_lens",
        "kv_lens",
        "block_table",
        "logits_indices",
        "kv_pool.0",
        "kv_pool.1",
    ]
    pool = model.graph.inputs[-1]
    assert (pool.dtype, str(pool.shape)) == (ir.DataType.UINT8, f"[num_blocks,{kv_block_bytes(2, 16, 16, kv_dtype)}]")
    for node in model.graph:
        if node.op_type == "PagedAttention":
            chosen = {
                name: node.attributes[name].value for name in ("block_size", "query_tile", "kv_split", "kv_dtype")
            }
            assert chosen == {
                "block_size": 16,
                "query_tile": 8,
                "kv_split": 256,
                "kv_dtype": ["fp32", "bf16", "int8", "fp8"].index(kv_dtype),
            }
            assert [v.name if v else "" for v in node.inputs[3:]] == [
                "",
                "",
                f"kv_pool.{node.attributes['layer'].as_int()}",
                "slot_mapping",
                "cu_query_lens",
                "kv_lens",
                "block_table",
            ]


@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("style", RopeStyle)
def test_rope_styles_are_told_apart(style: RopeStyle, rotary_dim: int) -> None:
    """Half and interleaved rotation differ only in which elements pair up; none may be taken for another."""

    def original(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        width = cos.shape[-1] * (2 if style.narrow else 1)
        return rope(q, cos, sin, int(style), width), rope(k, cos, sin, int(style), width)

    q, width = torch.zeros(1, 4, 5, 16), rotary_dim // 2 if style.narrow else rotary_dim
    assert rope_style(original, q, torch.zeros(1, 5, width)) == (style, rotary_dim)
    assert rope_style(lambda q, k, cos, sin: (q * 2, k), q, torch.zeros(1, 5, width)) is None


def test_half_table_is_the_distinct_columns() -> None:
    """By hand, for each spelling of three angles."""
    c = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(half_table(torch.cat((c, c)), RopeStyle.HALF), c)
    assert torch.equal(half_table(c.repeat_interleave(2), RopeStyle.INTERLEAVED), c)
    assert torch.equal(half_table(c, RopeStyle.INTERLEAVED_NARROW), c)


def test_stub_attention_is_attention() -> None:
    """The probe's verdict rests on the eager operator: it is compared with torch's own."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 9, 16, generator=generator) for heads in (4, 2, 2))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    flat = [x.transpose(1, 2).reshape(9, -1) for x in (q, k, v)]
    found = attention(*flat, 0, 4, 2, 0.25, 0, 0.0)
    assert torch.allclose(found, wanted.transpose(1, 2).reshape(9, -1), atol=1e-6)


@pytest.mark.slow
def test_demo_logits(steps: Any, tmp_path: Path) -> None:
    """The real model in fp32: within 1e-3 of transformers (logits of scale 30), chunked and beside another."""
    checkpoint = load_checkpoint("demo")
    model = export_model(checkpoint)
    run_passes(model, 8192)
    assert len(model.graph) < 400
    lower_cpu(model, kv_dtype="fp32", block_size=steps.block_size)
    a, b = (np.random.default_rng(i).integers(5, 40000, n) for i, n in ((0, 70), (1, 45)))
    with torch.no_grad():
        wanted = [checkpoint.model(torch.tensor(x)[None]).logits[0].numpy() for x in (a, b)]
    with steps.open_session(save_graph(model, tmp_path), model) as session:
        first = session.step(steps.pack([steps.Chunk(a[:40], 0, [7, 3, 9, 11, 2])])).copy()
        both = session.step(steps.pack([steps.Chunk(a[40:], 40, [7, 3, 9, 11, 2]), steps.Chunk(b, 0, [1, 5, 20])]))
        found = np.concatenate([first, both])
    assert np.abs(found - np.concatenate(wanted)).max() < 1e-3
