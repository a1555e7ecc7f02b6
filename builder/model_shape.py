"""The size of a model, from its config and its files' headers: what planning needs. Reads no weight, imports no torch.

A build trusts only the loaded model (`castline.builder.checkpoint`); this is the same facts without loading one.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from castline.builder.gguf_header import read_gguf_header
from castline.builder.model_source import DEMO, demo_path, model_name
from castline.builder.weight_shapes import FREQUENCIES, Shapes, is_called, layer_matmuls, qk_norm_size
from castline.engines.device_memory import WeightShapes
from castline.engines.errors import BuildError
from castline.engines.manifest import ModelFacts
from castline.engines.precision import Parameters

CONFIG_NAME = "config.json"
GATED_MODELS = frozenset(
    {"gemma", "gemma2", "gemma3_text", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"}
)
"""Whose layers are four attention and three MLP matrices and two norms, up to thousandths."""
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
HEADS = ("lm_head.weight", "embed_out.weight")
MAX_HEADER_BYTES = 100_000_000
"""Bound of the safetensors format."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Facts that say nothing of tokens (no end ids), and where the parameters are."""

    facts: ModelFacts
    parameters: Parameters
    weights: WeightShapes


def read_shape(model: str) -> ModelShape:
    """Of a Hugging Face directory, a GGUF file, or ``demo``. Raises BuildError naming file and field."""
    path = demo_path() if model == DEMO else Path(model).expanduser()
    if path.is_file():
        return _from_gguf(path, model)
    if not (path / CONFIG_NAME).is_file():
        raise BuildError(
            f"plan: {model} is no GGUF file and no directory with a {CONFIG_NAME}; a plan reads what is on this "
            "machine: download the model first, and name its directory"
        )
    return _from_directory(path, model)


def _from_directory(directory: Path, source: str) -> ModelShape:
    config = _Fields(directory / CONFIG_NAME, _json(directory / CONFIG_NAME))
    kind = config.text("model_type")
    _refuse_unbuildable(config, kind)
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    layers = config.size("num_hidden_layers")
    head_dim = config.size("head_dim", hidden // heads)
    kv_heads = config.size("num_key_value_heads", heads)
    vocab = config.size("vocab_size")
    tied = bool(config.values.get("tie_word_embeddings", True))  # only what differs from the default is written
    shapes = _stored_shapes(directory)
    if shapes is None:
        if kind not in GATED_MODELS:
            raise BuildError(
                f"plan: {directory} has no safetensors, and the size of a {kind} cannot be told from its config alone; "
                "put model.safetensors or its index beside it"
            )
        widths = (heads * head_dim, kv_heads * head_dim, config.size("intermediate_size"))
        shapes = _gated_shapes(layers, hidden, vocab, *widths)
    parameters = _count(shapes, EMBEDDINGS, HEADS, tied)
    facts = _facts(
        parameters,
        name=directory.resolve().name,
        architecture=kind,
        source=source,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position=_max_position(config),
        windows=_windows(config.values, layers),
    )
    weights = WeightShapes(
        parameters,
        vocab,
        layers,
        layer_matmuls(shapes, layers),
        qk_norm_size(shapes),
        _tables(config.values, head_dim),
        caps_logits=bool(config.values.get("final_logit_softcapping")),
    )
    return ModelShape(facts, parameters, weights)


def _gated_shapes(layers: int, hidden: int, vocab: int, query: int, key: int, inner: int) -> Shapes:
    """The weights of a model with gated layers; both tables."""
    matmuls = {
        "q_proj": (query, hidden),
        "k_proj": (key, hidden),
        "v_proj": (key, hidden),
        "o_proj": (hidden, query),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    layer = {**matmuls, "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes = {f"layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in layer.items()}
    return {**shapes, "norm.weight": (hidden,), EMBEDDINGS[0]: (vocab, hidden), HEADS[0]: (vocab, hidden)}


def _tables(values: dict[str, Any], head_dim: int) -> tuple[int, ...]:
    """Widths of RoPE's cosines and sines, of each kind of layer that has frequencies of its own."""
    rope = values.get("rope_parameters") or {}
    kinds = sum(isinstance(one, dict) for one in rope.values()) or (2 if values.get("rope_local_base_freq") else 1)
    factor = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or values.get("rotary_pct") or 1
    return (int(head_dim * factor) // 2,) * (2 * kinds)


def _refuse_unbuildable(config: "_Fields", kind: str) -> None:
    values = config.values
    if "text_config" in values or "vision_config" in values or values.get("is_encoder_decoder"):
        raise BuildError(f"plan: {kind} is more than a decoder of text, and castline builds text-only language models")
    if values.get("quantization_config") is not None:
        raise BuildError(
            f"plan: the weights of this {kind} are already quantised; start from the unquantised checkpoint"
        )
    if any((values.get(name) or 0) > 1 for name in EXPERT_FIELDS):
        raise BuildError(f"plan: {kind} is a mixture of experts, which castline does not build yet")


def _max_position(config: "_Fields") -> int:
    """LongRoPE switches frequencies past its original length: it ends there, as in a build."""
    limit = config.size("max_position_embeddings")
    rope = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) == "longrope":
        original = rope.get("original_max_position_embeddings")
        original = original or config.values.get("original_max_position_embeddings")
        limit = min(limit, int(original)) if original else limit
    return limit


def _windows(values: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Sliding window of each layer. Without a list of layer types a window is taken for every layer's."""
    window = values.get("sliding_window")
    if not window or values.get("use_sliding_window") is False:
        return ()
    kinds = values.get("layer_types") or ["sliding_attention"] * layers
    windows = tuple(int(window) if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def _stored_shapes(directory: Path) -> Shapes | None:
    """From the headers of the safetensors files; None where a file of them is missing."""
    index = directory / "model.safetensors.index.json"
    names = sorted(set(_json(index).get("weight_map", {}).values())) if index.is_file() else ["model.safetensors"]
    files = [directory / name for name in names]
    if not files or not all(file.is_file() for file in files):
        return None
    return {name: shape for file in files for name, shape in _safetensors_shapes(file).items()}


def _safetensors_shapes(file: Path) -> Shapes:
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        raw = stream.read(size) if size <= MAX_HEADER_BYTES else b""
    try:
        header = json.loads(raw)
        return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BuildError(f"plan: {file} is damaged: it has no header; copy it again") from None


def _from_gguf(path: Path, source: str) -> ModelShape:
    header = read_gguf_header(path)
    values = _Fields(path, header.values)
    kind = values.text("general.architecture")
    if header.values.get(f"{kind}.expert_count"):
        raise BuildError(f"plan: {path} is a mixture of experts, which castline does not build yet")
    for field in (f"{kind}.attention.head_count", f"{kind}.attention.head_count_kv"):
        if field in header.arrays:
            raise BuildError(f"plan: {path}: {field} is a list, and castline builds models whose layers are alike")
    hidden, heads = values.size(f"{kind}.embedding_length"), values.size(f"{kind}.attention.head_count")
    layers = values.size(f"{kind}.block_count")
    window = values.size(f"{kind}.attention.sliding_window", 0)
    parameters = _count(header.shapes, ("token_embd.weight",), ("output.weight",), tied=False)
    facts = _facts(
        parameters,
        name=model_name(path),
        architecture=kind,
        source=source,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=values.size(f"{kind}.attention.head_count_kv", heads),
        head_dim=values.size(f"{kind}.attention.key_length", hidden // heads),
        vocab_size=parameters.embedding // hidden,
        max_position=values.size(f"{kind}.context_length"),
        windows=(window,) * layers if window else (),
    )
    rotary = values.size(f"{kind}.rope.dimension_count", facts.head_dim)
    weights = WeightShapes(
        parameters,
        facts.vocab_size,
        layers,
        layer_matmuls({name: shape[::-1] for name, shape in header.shapes.items()}, layers),  # as ggml orders them
        qk_norm_size(header.shapes),
        (rotary // 2,) * 2,
        caps_logits=f"{kind}.final_logit_softcapping" in header.values,
    )
    return ModelShape(facts, parameters, weights)


def _facts(parameters: Parameters, **shape: Any) -> ModelFacts:
    return ModelFacts(
        num_parameters=parameters.total,
        num_lookup_parameters=parameters.embedding if parameters.head else 0,
        eos_token_ids=(),
        bos_token_id=None,
        **shape,
    )


def _count(shapes: Shapes, embeddings: tuple[str, ...], heads: tuple[str, ...], tied: bool) -> Parameters:
    """*tied* ignores a stored head: some checkpoints carry a copy of the embedding."""
    counted = {"embedding": 0, "head": 0, "layers": 0}
    for name, shape in shapes.items():
        if is_called(name, FREQUENCIES):
            continue
        part = "embedding" if is_called(name, embeddings) else "head" if is_called(name, heads) else "layers"
        counted[part] += math.prod(shape)
    if not counted["embedding"]:
        raise BuildError(
            f"plan: no tensor is called {' or '.join(embeddings)}: this is no language model castline knows"
        )
    return Parameters(counted["layers"], counted["embedding"], 0 if tied else counted["head"])


class _Fields:
    """Values of a config, each read with the name of its file and field in the error."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def text(self, field: str) -> str:
        value = self.values.get(field)
        if not isinstance(value, str):
            raise BuildError(f"plan: {self.path}: {field} is missing or no text; is this a language model?")
        return value

    def size(self, field: str, default: int | None = None) -> int:
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BuildError(f"plan: {self.path}: {field} is {value!r}, and a number of at least 1 is needed")
        return value


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BuildError(f"plan: {path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise BuildError(f"plan: {path} holds no object")
    return values
