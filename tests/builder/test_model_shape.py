"""A model's size from headers alone, against the same model loaded."""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from castline.builder.gguf_header import read_gguf_header
from castline.builder.model_shape import GATED_MODELS, read_shape
from castline.engines.errors import BuildError
from castline.engines.precision import Parameters

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 97}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


def save(directory: Path, kind: str, **fields: Any) -> Any:
    """A random model of *kind*, saved; returns it."""
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **HEADS, "pad_token_id": 0, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", sorted(GATED_MODELS - {"smollm3"}))
def test_headers_count_what_is_loaded(tmp_path: Path, kind: str, tied: bool) -> None:
    """To the parameter: a plan of another size than the engine's would promise another pool."""
    model = save(tmp_path, kind, tie_word_embeddings=tied)
    shape = read_shape(str(tmp_path))
    assert shape.facts.num_parameters == sum(p.numel() for p in model.parameters()) == shape.parameters.total
    assert shape.facts.num_lookup_parameters == (0 if tied else 97 * 32)
    assert Parameters.of(shape.facts) == shape.parameters
    assert (shape.facts.num_layers, shape.facts.hidden_size, shape.facts.num_heads) == (3, 32, 4)
    assert (shape.facts.num_kv_heads, shape.facts.max_position, shape.facts.vocab_size) == (2, 256, 97)
    assert shape.facts.head_dim == model.model.layers[0].self_attn.head_dim


@pytest.mark.parametrize("kind", sorted(GATED_MODELS - {"smollm3"}))
def test_a_config_alone_is_close(tmp_path: Path, kind: str) -> None:
    """Norms and biases of the architectures differ by thousandths of a real model; these are tiny, so by hundredths."""
    model = save(tmp_path, kind, tie_word_embeddings=False)
    (tmp_path / "model.safetensors").unlink()
    shape = read_shape(str(tmp_path))
    assert shape.facts.num_parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.03)


def test_shards_are_added_up(tmp_path: Path) -> None:
    """A large model has its headers in many files, and one that is missing means the sum is not known."""
    save(tmp_path, "llama", tie_word_embeddings=False)
    whole = read_shape(str(tmp_path)).parameters
    (tmp_path / "model.safetensors").unlink()
    shards = {"a": {"model.embed_tokens.weight": (97, 32)}, "b": {"x.weight": (5, 4), "lm_head.weight": (97, 32)}}
    for name, tensors in shards.items():
        save_file({key: torch.zeros(shape) for key, shape in tensors.items()}, tmp_path / f"{name}.safetensors")
    index = {key: f"{name}.safetensors" for name, tensors in shards.items() for key in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert read_shape(str(tmp_path)).parameters == Parameters(20, 97 * 32, 97 * 32)
    (tmp_path / "b.safetensors").unlink()
    assert read_shape(str(tmp_path)).parameters.total == pytest.approx(whole.total, rel=0.01)


def test_windows_follow_the_layer_types(tmp_path: Path) -> None:
    """gemma's layers alternate; a window in every layer would make the estimate too fast."""
    save(
        tmp_path,
        "gemma3_text",
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    assert read_shape(str(tmp_path)).facts.windows == (8, 0, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, r"config\.json: hidden_size is None, and a number of at least 1 is needed"),
        ({"num_hidden_layers": "3"}, r"num_hidden_layers is '3'"),
        ({"model_type": None}, "model_type is missing"),
        ({"num_experts": 8}, "mixture of experts"),
        ({"text_config": {}}, "text-only"),
        ({"quantization_config": {"bits": 4}}, "already quantised"),
    ],
)
def test_what_cannot_be_planned_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A wrong size must not be printed for a model that castline cannot build."""
    save(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(BuildError, match=message):
        read_shape(str(tmp_path))


def test_an_architecture_of_unknown_layers_needs_its_headers(tmp_path: Path) -> None:
    """The formula is that of gated models; another's size from it would be wrong by a third."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "starcoder2", **SIZES, **HEADS}))
    with pytest.raises(BuildError, match=r"starcoder2 cannot be told from its config alone; put model\.safetensors"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize("raw", [b"", b"\x05", b"\xff" * 20, (3).to_bytes(8, "little") + b"[1]"])
def test_a_damaged_safetensors_header_is_named(tmp_path: Path, raw: bytes) -> None:
    """A cut download."""
    save(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(BuildError, match=r"model\.safetensors is damaged"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize("model", ["no/such", "", "Qwen/Qwen3-0.6B"])
def test_a_model_that_is_not_here(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id is not fetched by a command that promises to read headers only."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BuildError, match="download the model first, and name its directory"):
        read_shape(model)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(tensors: dict[str, tuple[int, ...]], **changes: bytes) -> bytes:
    """A header as llama.cpp writes it, with arrays of strings and numbers before and between what is read."""
    u32 = {
        "block_count": 3, "embedding_length": 32, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": 16, "context_length": 256,
    }  # fmt: skip
    values = {
        "tokenizer.ggml.tokens": struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
        "general.architecture": struct.pack("<I", 8) + text("llama"),
        "tokenizer.ggml.scores": struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3),
        "llama.rope.freq_base": struct.pack("<If", 6, 1e4),
        "tokenizer.ggml.add_bos_token": struct.pack("<I?", 7, True),
        **{f"llama.{name}": struct.pack("<II", 4, value) for name, value in u32.items()},
        **changes,
    }
    body = b"".join(text(name) + raw for name, raw in values.items())
    for name, shape in tensors.items():
        body += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + body


TENSORS = {"token_embd.weight": (32, 97), "blk.0.attn_output.weight": (64, 32), "rope_freqs.weight": (8,)}


def test_a_gguf_header_is_enough(tmp_path: Path) -> None:
    """Shapes say the size, and blk.0.attn_output.weight is not the head for ending like one."""
    path = tmp_path / "tiny-Q4_0.gguf"
    path.write_bytes(gguf(TENSORS))
    shape = read_shape(str(path))
    assert shape.parameters == Parameters(64 * 32, 97 * 32, 0)
    assert (shape.facts.name, shape.facts.architecture, shape.facts.vocab_size) == ("tiny", "llama", 97)
    assert (shape.facts.num_layers, shape.facts.num_kv_heads, shape.facts.head_dim) == (3, 2, 16)
    path.write_bytes(gguf({**TENSORS, "output.weight": (32, 97)}))
    assert read_shape(str(path)).facts.num_lookup_parameters == 97 * 32


def test_a_cut_gguf_is_refused_wherever_it_was_cut(tmp_path: Path) -> None:
    """Every length of a download that stopped in the header: a typed error, no crash and no endless loop."""
    whole = gguf(TENSORS)
    path = tmp_path / "cut.gguf"
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(BuildError, match="is not a GGUF file, or is cut short"):
            read_gguf_header(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.attention.head_count_kv": struct.pack("<IIQ2I", 9, 4, 2, 1, 2)}, "head_count_kv is a list"),
        ({"llama.expert_count": struct.pack("<II", 4, 8)}, "mixture of experts"),
        ({"llama.block_count": struct.pack("<II", 4, 0)}, "block_count is 0"),
        ({"x": struct.pack("<II", 99, 0)}, "value type 99 is unknown"),
        ({"x": struct.pack("<IQ", 8, 1 << 60)}, "bytes wanted"),
    ],
)
def test_a_gguf_that_cannot_be_planned(tmp_path: Path, changes: dict[str, bytes], message: str) -> None:
    """Layers that differ have no one size of a KV block."""
    (tmp_path / "m.gguf").write_bytes(gguf(TENSORS, **changes))
    with pytest.raises(BuildError, match=message):
        read_shape(str(tmp_path / "m.gguf"))


def test_the_demo_is_read_without_a_library() -> None:
    """plan answers in a moment, on an installation that only serves."""
    import subprocess

    code = (
        "import sys; from castline.builder.model_shape import read_shape; s = read_shape('demo')\n"
        "print(s.facts.num_parameters, sorted({'torch', 'transformers', 'gguf', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "134515008 []"
