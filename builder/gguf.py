"""GGUF files: found, measured, and read through transformers' own conversion.

transformers reads architecture, tokenizer and weights; this module adds what it leaves out: the weights without a
further library, pre-tokenizers it would silently replace, and the end-of-turn tokens.
"""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    modeling_gguf_pytorch_utils,
)

from castline.builder.memory import require_memory
from castline.builder.model_source import model_name
from castline.engines.errors import BuildError

conversion: Any = modeling_gguf_pytorch_utils
library: Any = gguf

_BYTE_LEVEL = {"default", "gpt-2", "gpt2", "olmo", "mpt", "jais", "phi-2"}
"""Pre-tokenizers that are GPT-2's byte-level split, which is what transformers falls back to."""
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
"""GPT-2's split after each digit has been set apart (llama.cpp, llama-vocab.cpp)."""
_KNOWN_TO_TRANSFORMERS = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe",
    "tekken", "qwen2", "deepseek-r1-qwen", "gpt-4o", "llama4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufParts:
    """What a GGUF file holds, ready to use. ``end_ids`` are its end-of-sequence, -turn and -message tokens."""

    name: str
    model: PreTrainedModel
    tokenizer: Any
    end_ids: tuple[int, ...]


@contextmanager
def _one_header() -> Iterator[None]:
    """Inside the block transformers parses a header once, a table of names once, and draws no bar.

    It would parse for config, tokenizer and weights apart, and look the table up for every module: 15 s for the demo.
    """
    reader, names, bar = library.GGUFReader, library.get_tensor_name_map, conversion.tqdm
    library.GGUFReader = functools.cache(reader)
    library.get_tensor_name_map = functools.cache(names)
    conversion.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        library.GGUFReader, library.get_tensor_name_map, conversion.tqdm = reader, names, bar


def load_gguf(path: Path, check_config: Any) -> GgufParts:
    """Model in fp32 and tokenizer of a GGUF file; *check_config* may refuse the config before a weight is read."""
    with _one_header():
        try:
            reader = library.GGUFReader(str(path))
        except (ValueError, IndexError) as error:
            raise BuildError(f"load: {path} is not a GGUF file, or is cut short ({error}); fetch it again") from None
        folder, file = str(path.parent), path.name
        try:
            config = AutoConfig.from_pretrained(folder, gguf_file=file)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise BuildError(f"load: transformers cannot read {path}: {error}") from None
        check_config(config)
        sizes = [math.prod(int(d) for d in t.shape) for t in reader.tensors]
        require_memory(sum(sizes), max(sizes))
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        _fix_pre_tokenizer(tokenizer, _text(reader, "tokenizer.ggml.pre"), path)
        model = _load_weights(path, config)
    return GgufParts(model_name(path), model, tokenizer, _end_ids(reader))


def _load_weights(path: Path, config: PreTrainedConfig) -> Any:
    """Tensors are dequantised one by one to fp32 and become the parameters: no second copy."""
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        skeleton: Any = auto.from_config(config)
    try:
        tensors = conversion.load_gguf_checkpoint(
            str(path), return_tensors=True, model_to_load=skeleton, torch_dtype=torch.float32
        )
    except (ValueError, NotImplementedError) as error:
        raise BuildError(f"load: transformers cannot read the weights of {path}: {error}") from None
    model, info = type(skeleton).from_pretrained(
        None, config=config, state_dict=tensors["tensors"], dtype=torch.float32, output_loading_info=True
    )
    if info["missing_keys"] or info["mismatched_keys"]:
        missing = sorted(info["missing_keys"]) + sorted(str(k) for k in info["mismatched_keys"])
        raise BuildError(f"load: {path} lacks weights of {config.model_type}: {', '.join(missing[:5])}")
    return model


def _text(reader: Any, key: str) -> str | None:
    field = reader.fields.get(key)
    return None if field is None else str(field.contents())


def _fix_pre_tokenizer(tokenizer: Any, pre: str | None, path: Path) -> None:
    """Splits text as the file says. A silent fall-back would feed the model token sequences it never saw."""
    if pre is None or pre in _BYTE_LEVEL or pre in _KNOWN_TO_TRANSFORMERS:
        return
    if pre not in _DIGITS_APART:
        raise BuildError(
            f"load: {path} splits text by the rules {pre!r}, which castline cannot reproduce; "
            "build from the safetensors checkpoint of the same model"
        )
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _end_ids(reader: Any) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    fields = (reader.fields.get(f"tokenizer.ggml.{key}") for key in keys)
    return tuple(int(f.contents()) for f in fields if f is not None)
