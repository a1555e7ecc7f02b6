"""A model as it comes: from a Hugging Face directory, the hub, or a GGUF file, to torch in fp32 and plain facts.

`load_checkpoint` is the first stage of a build. Whatever castline cannot build is refused here, in plain words, before
anything long starts.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from castline.builder.finite import require_finite
from castline.builder.gguf import load_gguf
from castline.builder.memory import require_memory
from castline.builder.model_source import DEMO, demo_path
from castline.builder.probe import ModelProbe, probe_model
from castline.engines.errors import BuildError
from castline.engines.manifest import ModelFacts

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
REASON_LENGTH = 300
"""Characters of a library's own message that are passed on."""
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_STATELESS_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded model. ``model`` is in fp32 and evaluation mode; nothing alters it for good."""

    model: PreTrainedModel
    tokenizer: Any
    facts: ModelFacts
    probe: ModelProbe

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    def save_tokenizer(self, directory: Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json, generation_config.json, and chat_template.jinja if any."""
        self.tokenizer.save_pretrained(directory)
        generation = self.model.generation_config
        fields = generation.to_diff_dict() if generation is not None else {}
        fields |= {"eos_token_id": list(self.facts.eos_token_ids), "bos_token_id": self.facts.bos_token_id}
        text = json.dumps(fields, indent=2, sort_keys=True)
        (directory / "generation_config.json").write_text(text + "\n", encoding="utf-8")


def load_checkpoint(model: str) -> Checkpoint:
    """Loads *model*: a directory, a GGUF file, a hub id, or ``demo``. Raises BuildError naming stage and cure."""
    with _quiet_transformers():
        path = demo_path() if model == DEMO else _local_path(model)
        if path.is_file():
            gguf = load_gguf(path, check_config)
            return _finish(gguf.model, gguf.tokenizer, gguf.name, model, gguf.end_ids)
        directory = path if path.is_dir() else _download(model)
        name = path.resolve().name if path.is_dir() else model.split("/")[-1]
        return _finish(*_load_directory(directory), name, model, ())


def _local_path(model: str) -> Path:
    """*model* as a path, which may not exist. Raises BuildError for what can be none."""
    path = Path(model)
    try:
        path = path.expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL in it, a closed folder, an unknown ~user
        raise BuildError(f"load: {model[:80]!r} cannot be read: {getattr(error, 'strerror', error)}") from None
    if not model:
        raise BuildError(f"load: MODEL is empty; name a model directory, a GGUF file, a hub id or `{DEMO}`")
    return path


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    log: Any = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def _download(model: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", model):
        raise BuildError(f"load: {model} does not exist; name a model directory, a GGUF file, a hub id or `{DEMO}`")
    import huggingface_hub

    try:
        path = huggingface_hub.snapshot_download(
            model,
            allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"],
            ignore_patterns=["consolidated*", "original/*"],
        )
    except Exception as error:  # the hub client raises through several transports' own types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BuildError(
            f"load: {model} is no local directory or file, and cannot be fetched from the hub ({reason}); "
            "download it elsewhere and name its directory, or check the id, the network and HF_TOKEN"
        ) from None
    return Path(path)


def _load_directory(directory: Path) -> tuple[PreTrainedModel, Any]:
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise BuildError(
            f"load: {directory} has no config that transformers {transformers.__version__} can read: {_reason(error)}"
        ) from None
    check_config(config)
    sizes = [math.prod(shape) for shape in _stored_shapes(_weight_files(directory))]
    require_memory(sum(sizes), max(sizes))
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot parse
        raise BuildError(
            f"load: {directory} has no tokenizer that can be read ({_reason(error)}); add its tokenizer.json"
        ) from None
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (RuntimeError, ValueError, TypeError, ArithmeticError) as error:
        raise BuildError(f"load: the config in {directory} describes no model that can be made: {error}") from None
    model, info = loaded
    if info["mismatched_keys"]:
        name, stored, wanted = sorted(info["mismatched_keys"])[0]
        raise BuildError(
            f"load: the weights in {directory} do not fit its config: {name} is {list(stored)}, and the config "
            f"wants {list(wanted)}; weights and config.json are of different models"
        )
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:5])
        raise BuildError(f"load: {directory} lacks weights of {config.model_type}: {missing}")
    return model, tokenizer


def _reason(error: Exception) -> str:
    """What *error* says, on one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= REASON_LENGTH else f"{text[:REASON_LENGTH]}…"


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = [directory / name for name in _indexed(index)]
    else:
        files = [f for f in [directory / "model.safetensors"] if f.is_file()]
    absent = [f.name for f in files if not f.is_file()]
    if absent or not files:
        what = ", ".join(absent) or "model.safetensors"
        raise BuildError(
            f"load: {directory} has no {what}; castline reads safetensors and GGUF, convert the weights first"
        )
    return files


def _indexed(index: Path) -> list[str]:
    """Names of the files that an index of shards lists, sorted."""
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BuildError(f"load: {index} is damaged: it has no weight_map; copy it again") from None


def _stored_shapes(files: Iterable[Path]) -> list[list[int]]:
    """Shapes of every tensor, from the files' headers."""
    shapes: list[list[int]] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes += [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
        except SafetensorError as error:
            raise BuildError(f"load: {file} is damaged: {error}") from None
    return shapes


def check_config(config: PreTrainedConfig) -> None:
    """Raises BuildError for what castline cannot build, as far as the config tells."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise BuildError(f"load: {kind} is an encoder-decoder; castline builds decoder-only language models")
    if hasattr(config, "text_config") or hasattr(config, "vision_config"):
        raise BuildError(f"load: {kind} takes more than text; castline builds text-only language models")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BuildError(f"load: transformers has no causal language model for {kind}")
    if getattr(config, "quantization_config", None) is not None:
        raise BuildError(
            f"load: the weights of this {kind} are already quantised; start from the unquantised checkpoint"
        )
    if any((getattr(config, name, 0) or 0) > 1 for name in _EXPERT_FIELDS):
        raise BuildError(f"load: {kind} is a mixture of experts, which castline does not build yet")
    stateful = set(getattr(config, "layer_types", None) or ()) - _STATELESS_LAYERS
    if stateful:
        raise BuildError(
            f"load: {kind} has {', '.join(sorted(stateful))} layers; castline builds models of attention layers only"
        )
    for rope in _rope_parameters(config):
        rope_type = rope.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise BuildError(
                f"load: rope scaling {rope_type!r} is not supported: positions past the trained length would come out "
                f"wrong; castline knows {', '.join(ROPE_TYPES)}"
            )


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """RoPE parameters, one set for all layers or one a layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def max_position(config: PreTrainedConfig) -> int:
    """Tokens that the model can attend to. LongRoPE switches frequencies past its original length: it ends there."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        raise BuildError(f"load: the config of {config.model_type} does not say its max_position_embeddings; add it")
    for rope in _rope_parameters(config):
        if rope.get("rope_type") == "longrope":
            limit = min(limit, rope["original_max_position_embeddings"])
    return int(limit)


def _finish(model: Any, tokenizer: Any, name: str, source: str, end_ids: tuple[int, ...]) -> Checkpoint:
    if not tokenizer.is_fast:
        raise BuildError(f"load: {name} has no tokenizer.json; convert its tokenizer to the fast format first")
    model = model.eval().requires_grad_(False)
    require_finite(model)
    probe = probe_model(model)
    first = probe.layers[0]
    windows = tuple(a.window for a in probe.layers)
    generation = model.generation_config
    configured = [generation.eos_token_id if generation is not None else None, model.config.eos_token_id]
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else model.config.bos_token_id
    facts = ModelFacts(
        name=name,
        architecture=model.config.model_type,
        source=source,
        num_layers=len(probe.layers),
        hidden_size=model.config.hidden_size,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        vocab_size=probe.vocab_size,
        max_position=max_position(model.config),
        num_parameters=sum(p.numel() for p in model.parameters()),
        eos_token_ids=merge_ids([*configured, tokenizer.eos_token_id, list(end_ids)]),
        bos_token_id=bos,
        windows=windows if any(windows) else (),
        num_lookup_parameters=_lookup_parameters(model),
    )
    return Checkpoint(model, tokenizer, facts, probe)


def _lookup_parameters(model: Any) -> int:
    """Of the embedding, where the head has a matrix of its own."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return 0 if embedding is head else int(embedding.numel())


def merge_ids(sources: Iterable[int | list[int] | None]) -> tuple[int, ...]:
    """Every token id of *sources*, first seen first."""
    listed = [source if isinstance(source, list) else [source] for source in sources if source is not None]
    return tuple(dict.fromkeys(token for source in listed for token in source))
