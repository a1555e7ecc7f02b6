"""Every architecture that castline names: checkpoint → export → passes → cpu engine, against transformers."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from castline.builder.checkpoint import Checkpoint, load_checkpoint
from castline.builder.export import export_model
from castline.builder.lower import lower_cpu, save_graph
from castline.builder.passes import PassReport, run_passes
from castline.builder.quantize import matmul_shapes, quantize
from castline.builder.recipes import FALLBACK, LINEAR_W8, RECIPES, MatmulKernel
from castline.engines.errors import BuildError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt2")
MAX_POSITIONS = 256
TOLERANCE = 2e-5
"""Of logits, relative to their largest magnitude."""


@dataclass(frozen=True, slots=True)
class Built:
    checkpoint: Checkpoint
    model: ir.Model
    reports: dict[str, PassReport]


def build(directory: Path) -> Built:
    checkpoint = load_checkpoint(str(directory))
    model = export_model(checkpoint)
    reports = {report.name: report for report in run_passes(model, MAX_POSITIONS)}
    return Built(checkpoint, model, reports)


def reference_logits(checkpoint: Checkpoint, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """transformers' own eager attention, over the whole sequence at once."""
    model: Any = checkpoint.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(tokens)[None], use_cache=False).logits[0].numpy()
    model.set_attn_implementation(before)
    return np.asarray(logits)


def assert_close(found: NDArray[np.float32], wanted: NDArray[np.float32], tolerance: float = TOLERANCE) -> None:
    assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def built(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Built:
    return build(tiny_checkpoint(request.param))


def two_sequences(vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rng = np.random.default_rng(7)
    return rng.integers(3, vocab_size, 70), rng.integers(3, vocab_size, 45)


def test_logits_equal_transformers(built: Built, steps: Any, tmp_path: Path) -> None:
    """A wrong window, scale, norm or rope; a chunk border, mixed step or scattered block table that shows in logits."""
    model = lower_cpu(built.model.clone(), kv_dtype="fp32", block_size=steps.block_size)
    a, b = two_sequences(steps.vocab_size)
    wanted_a, wanted_b = (reference_logits(built.checkpoint, x) for x in (a, b))
    blocks_a, blocks_b = [7, 3, 9, 12, 1], [8, 2, 30]
    with steps.open_session(save_graph(model, tmp_path), model) as session:
        assert_close(session.step(steps.pack([steps.Chunk(a[:37], 0, blocks_a)])), wanted_a[:37])
        mixed = session.step(steps.pack([steps.Chunk(a[37:69], 37, blocks_a), steps.Chunk(b[:44], 0, blocks_b)])).copy()
        assert_close(mixed[:32], wanted_a[37:69])
        assert_close(mixed[32:], wanted_b[:44])
        decode = [steps.Chunk(b[44:], 44, blocks_b), steps.Chunk(a[69:], 69, blocks_a)]
        assert_close(session.step(steps.pack(decode)), np.concatenate([wanted_b[44:], wanted_a[69:]]))


def test_only_the_rows_asked_for_come_back_in_their_order(built: Built, steps: Any, tmp_path: Path) -> None:
    """Rows taken before the last layer's MLP must be the rows asked for, in the order asked."""
    model = lower_cpu(built.model.clone(), kv_dtype="fp32", block_size=steps.block_size)
    a, _ = two_sequences(steps.vocab_size)
    with steps.open_session(save_graph(model, tmp_path), model) as session:
        every = session.step(steps.pack([steps.Chunk(a, 0, [4, 6, 5, 2, 0])])).copy()
        some = session.step(steps.pack([steps.Chunk(a, 0, [4, 6, 5, 2, 0])], rows=[69, 3, 3]))
    np.testing.assert_allclose(some, every[[69, 3, 3]], rtol=0, atol=1e-4)


def test_every_layer_is_fused(built: Built) -> None:
    """A pass that stops matching would only make engines slower; nothing else would tell."""
    facts = built.checkpoint.facts
    layers, arch = facts.num_layers, facts.architecture
    matched = {name: report.matched for name, report in built.reports.items()}
    attention = [n for n in built.model.graph if n.op_type == "PagedAttention"]
    assert matched["RoPE and QK-norm inside attention"] == (0 if arch == "gpt2" else layers)  # learned positions
    assert matched["RoPE as standard operators"] == 0
    assert matched["QKV in one matmul"] == layers
    assert matched["gate and up in one matmul"] == (0 if arch in ("phi3", "gpt2") else layers)  # merged, and not gated
    assert matched["GELU"] == (layers if arch == "gpt2" else 0)
    assert matched["tied head shares the embedding"] == (arch in ("llama", "gemma", "gemma2", "gemma3_text", "gpt2"))
    # gemma3 turns local and global layers by different angles; gpt2 looks its positions up.
    assert matched["functions of positions as tables"] == {"gemma3_text": 4, "gpt2": 1}.get(arch, 2)
    assert [n.attributes["qk_norm"].as_int() for n in attention] == [
        {"qwen3": 1, "gemma3_text": 1, "olmo2": 2}.get(arch, 0)
    ] * layers
    counts = Counter(n.op_type for n in built.model.graph)
    assert counts["MatMul"] + counts["Gemm"] == 4 * layers + 1
    assert not any(counts[name] for name in ("Reciprocal", "Transpose", "Concat", "Cos", "Sin", "Unsqueeze", "Reshape"))


NODES_A_LAYER = {"gemma2": 9, "gemma3_text": 9, "olmo2": 9, "gpt2": 7}
"""Linear QKV, attention, Linear out, Linear gate and up, Linear down. Norms of a sublayer's own output, before the
residual is added, stay a node, and with them the addition; so do gpt2's LayerNorms, which are no RMSNorms."""


def quantized(built: Built, kernel: MatmulKernel | None = None) -> tuple[ir.Model, dict[str, PassReport]]:
    """The model with *kernel* everywhere, or as recipe int8 has it without tuning."""
    model = built.model.clone()
    recipe = RECIPES["int8"]
    shapes = matmul_shapes(model)
    defaults = {shape: (recipe.head_kernels if head else recipe.layer_kernels)[0] for shape, head in shapes.items()}
    choices = dict.fromkeys(shapes, kernel) if kernel else defaults
    reports = quantize(model, choices, recipe.embedding_kernel)
    return model, {report.name: report for report in reports}


def test_a_layer_is_five_nodes(built: Built, steps: Any) -> None:
    """Every node a layer costs a dispatch in every step: a fold that stops matching must not go unseen."""
    facts = built.checkpoint.facts
    model, reports = quantized(built)
    nodes = [node for node in model.graph if node.op_type != "Gather"]  # once a step: tables of positions, wanted rows
    attention = [i for i, node in enumerate(nodes) if node.op_type == "PagedAttention"]
    expected = NODES_A_LAYER.get(facts.architecture, 5)
    assert np.diff(attention).tolist() == [expected] * (facts.num_layers - 1)
    assert reports["matmuls and what surrounds them as Linear"].matched == 4 * facts.num_layers + 1
    counts = Counter(node.op_type for node in nodes)
    assert counts["Linear"] == 4 * facts.num_layers + 1
    assert not any(counts[name] for name in ("MatMul", "Gemm", "Sigmoid", "Gelu", "Split", "Cast", "Reshape"))
    assert counts["Embedding"] == 1  # of tokens, whether the head reads the same bytes or not
    tables = [value for value in model.graph.initializers.values() if value.dtype == ir.DataType.FLOAT]
    assert not [table.name for table in tables if steps.vocab_size in (table.shape or ())]


def test_a_residual_sum_before_a_norm_is_one_node_around_other_kernels(built: Built) -> None:
    """Where a matmul is not Linear, the norm after its residual must still not cost a node of its own."""
    _, reports = quantized(built, FALLBACK)
    facts = built.checkpoint.facts
    # Two norms a layer see a residual sum, except in olmo2, which normalises before it adds, and in gpt2 (LayerNorm).
    expected = {"olmo2": 1, "gpt2": 0}.get(facts.architecture, 2 * facts.num_layers)
    assert reports["residual + RMSNorm"].matched == expected
    assert reports["matmuls as MatMulNBits"].matched == 4 * facts.num_layers + 1


def test_batch_axis_is_gone_and_the_last_mlp_runs_on_wanted_rows(built: Built) -> None:
    """The head, the final norm and the last layer's MLP must not compute rows nobody asked for."""
    assert built.reports["batch axis dropped"].matched > 0
    assert built.reports["rows taken after the last attention"].matched >= 9
    head = next(n for n in reversed(list(built.model.graph)) if n.op_type in ("MatMul", "Gemm"))
    rows = head.inputs[0]
    assert rows is not None
    assert rows.shape is not None
    assert str(rows.shape[0]) == "R"


def test_windows_and_softcaps_reach_the_nodes(built: Built) -> None:
    """A sliding window read from the wrong place would go unseen until a long prompt."""
    arch = built.checkpoint.facts.architecture
    nodes = [n for n in built.model.graph if n.op_type == "PagedAttention"]
    windows = [n.attributes["window"].as_int() for n in nodes]
    expected = {"mistral": [24, 24], "gemma2": [24, 0, 24, 0], "gemma3_text": [24, 0, 24, 0]}
    assert windows == expected.get(arch, [0] * len(nodes))
    assert built.checkpoint.facts.windows == (tuple(windows) if any(windows) else ())
    assert {n.attributes["softcap"].as_float() for n in nodes} == {2.0 if arch == "gemma2" else 0.0}


@pytest.mark.parametrize("kernel", [None, FALLBACK, LINEAR_W8], ids=["linear-w8-g32", "nbits", "linear-w8"])
def test_int8_runs_and_is_close(built: Built, kernel: MatmulKernel | None, steps: Any, tmp_path: Path) -> None:
    """Quantised weights, padded groups included, with all that is folded around them, stay near their model: a gate
    taken for the up-projection, a lost bias or residual is far."""
    model, _ = quantized(built, kernel)
    lower_cpu(model, kv_dtype="int8", block_size=steps.block_size)
    a, _ = two_sequences(steps.vocab_size)
    wanted = torch.tensor(reference_logits(built.checkpoint, a)).log_softmax(-1)
    with steps.open_session(save_graph(model, tmp_path), model, "int8") as session:
        found = torch.tensor(session.step(steps.pack([steps.Chunk(a, 0, [4, 6, 5, 2, 0])]))).log_softmax(-1)
    divergence = (wanted.exp() * (wanted - found)).sum(-1).mean().item()
    assert 0 < divergence < 0.05


ROPE_SCALING: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("scaling", ROPE_SCALING)
def test_rope_holds_past_the_original_length(
    scaling: str, tiny_checkpoint: Callable[..., Path], steps: Any, tmp_path: Path
) -> None:
    """C09: garbage past a rope position. Checked at the original maximum −1, 0, +1 and twice it, decoded one by one."""
    original = 64
    rope = ROPE_SCALING[scaling] | {"rope_theta": 10000.0}
    max_position = original if scaling == "default" else 4 * original
    built = build(tiny_checkpoint("llama", max_position_embeddings=max_position, rope_parameters=rope))
    tokens = np.random.default_rng(3).integers(3, steps.vocab_size, 2 * original + 1)
    wanted = reference_logits(built.checkpoint, tokens)
    model = lower_cpu(built.model, kv_dtype="fp32", block_size=steps.block_size)
    blocks = [5, 1, 7, 3, 9, 11, 2, 4, 0]
    with steps.open_session(save_graph(model, tmp_path), model) as session:
        session.step(steps.pack([steps.Chunk(tokens[: original - 1], 0, blocks)]))
        for position in (original - 1, original, original + 1):
            found = session.step(steps.pack([steps.Chunk(tokens[position : position + 1], position, blocks)]))
            assert_close(found, wanted[position : position + 1])
        rest = session.step(steps.pack([steps.Chunk(tokens[original + 2 :], original + 2, blocks)]))
        assert_close(rest, wanted[original + 2 :])
    assert built.checkpoint.facts.max_position == max_position


def test_longrope_ends_at_its_original_length(tiny_checkpoint: Callable[..., Path], steps: Any, tmp_path: Path) -> None:
    """LongRoPE switches frequencies by length, which a cache cannot follow: the engine ends where it would switch."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [4.0 + i for i in range(8)],
        "original_max_position_embeddings": 64,
    }
    directory = tiny_checkpoint("phi3", original_max_position_embeddings=64, rope_parameters=rope)
    built = build(directory)
    assert built.checkpoint.facts.max_position == 64
    tokens = np.random.default_rng(3).integers(3, steps.vocab_size, 64)
    wanted = reference_logits(built.checkpoint, tokens)
    model = lower_cpu(built.model, kv_dtype="fp32", block_size=steps.block_size)
    with steps.open_session(save_graph(model, tmp_path), model) as session:
        assert_close(session.step(steps.pack([steps.Chunk(tokens, 0, [5, 1, 7, 3])])), wanted)


@pytest.mark.parametrize("rope_type", ["dynamic", "proportional", "from_the_future"])
def test_unknown_rope_scaling_fails_the_build(
    rope_type: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """C09: a scaling that we do not compute must stop the build, and not serve garbage past the trained length."""
    source = tiny_checkpoint("llama")
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BuildError, match=rope_type):
        load_checkpoint(str(tmp_path))


def test_partial_rotary_stays_outside_and_is_right(
    tiny_checkpoint: Callable[..., Path], steps: Any, tmp_path: Path
) -> None:
    """Where RoPE cannot move inside attention, it must come out as standard operators that compute the same."""
    built = build(
        tiny_checkpoint(
            "gpt_neox", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}
        )
    )
    assert built.reports["RoPE and QK-norm inside attention"].matched == 0
    tokens = np.random.default_rng(5).integers(3, steps.vocab_size, 40)
    wanted = reference_logits(built.checkpoint, tokens)
    model = lower_cpu(built.model, kv_dtype="fp32", block_size=steps.block_size)
    with steps.open_session(save_graph(model, tmp_path), model) as session:
        first = session.step(steps.pack([steps.Chunk(tokens[:21], 0, [5, 1, 7])])).copy()
        rest = session.step(steps.pack([steps.Chunk(tokens[21:], 21, [5, 1, 7])]))
        assert_close(np.concatenate([first, rest]), wanted)
