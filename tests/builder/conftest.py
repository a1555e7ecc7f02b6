"""Tiny random checkpoints of many architectures, and the step that feeds packed sequences to a session."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from castline.engines.capacity import kv_block_bytes
from castline.engines.manifest import KvDtype
from castline.plugins.contract import StepTensors
from castline.plugins.cpu.session import CpuSession, SessionOptions

torch.set_num_threads(1)

VOCAB_SIZE = 272
BLOCK_SIZE = 16

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "attention_dropout": 0.0,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
    },
    "gemma3_text": {
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "phi3": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "olmo2": {},
}


def save_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer of 256 bytes and three special tokens."""
    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template="{{ messages }}"
    )
    fast.save_pretrained(directory)


def randomise(model: torch.nn.Module) -> None:
    """Norm weights and biases are initialised to ones and zeros, which would hide a pass that mixes them up."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            centre = 0.0 if name.endswith("bias") else float(parameter.mean())
            torch.nn.init.normal_(parameter, centre, 0.2)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_checkpoint(arch, **config)``: a directory with a seeded model, saved once for the same arguments."""
    made: dict[str, Path] = {}

    def make(arch: str, **config: Any) -> Path:
        key = repr((arch, sorted(config.items())))
        if key not in made:
            directory = tmp_path_factory.mktemp(arch)
            torch.manual_seed(len(arch))
            settings = AutoConfig.for_model(arch, **(COMMON | ARCHITECTURES.get(arch, {}) | config))
            model = AutoModelForCausalLM.from_config(settings).float()
            with torch.no_grad():
                randomise(model)
            model.save_pretrained(directory)
            save_tokenizer(directory)
            made[key] = directory
        return made[key]

    return make


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next *tokens* of a sequence that has *computed* tokens in *blocks*."""

    tokens: NDArray[np.int64]
    computed: int
    blocks: Sequence[int]


def pack(chunks: Sequence[Chunk], rows: Sequence[int] | None = None) -> StepTensors:
    """One step over *chunks*; all rows of logits unless *rows* says which."""
    positions = [np.arange(c.computed, c.computed + len(c.tokens)) for c in chunks]
    slots = [
        np.asarray(c.blocks)[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for c, p in zip(chunks, positions, strict=True)
    ]
    table = np.zeros((len(chunks), max(len(c.blocks) for c in chunks)), np.int32)
    for i, chunk in enumerate(chunks):
        table[i, : len(chunk.blocks)] = chunk.blocks
    total = sum(len(c.tokens) for c in chunks)
    return StepTensors(
        input_ids=np.concatenate([c.tokens for c in chunks]).astype(np.int64),
        positions=np.concatenate(positions).astype(np.int64),
        slot_mapping=np.concatenate(slots).astype(np.int32),
        cu_query_lens=np.cumsum([0, *(len(c.tokens) for c in chunks)]).astype(np.int32),
        kv_lens=np.array([c.computed + len(c.tokens) for c in chunks], np.int32),
        block_table=table,
        logits_indices=np.arange(total) if rows is None else np.array(rows, np.int64),
    )


def open_session(graph: Path, model: ir.Model, kv_dtype: KvDtype = "fp32", num_blocks: int = 48) -> CpuSession:
    """A session of one thread over the graph saved at *graph* from *model*."""
    node = next(n for n in model.graph if n.op_type == "PagedAttention")
    heads, head_dim = node.attributes["num_kv_heads"].as_int(), node.attributes["head_dim"].as_int()
    block_bytes = kv_block_bytes(heads, head_dim, BLOCK_SIZE, kv_dtype)
    return CpuSession(
        graph,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        block_bytes=block_bytes,
        options=SessionOptions(num_threads=1),
    )


@pytest.fixture(scope="session")
def steps() -> Any:
    """`Chunk`, `pack`, `open_session` and the block size, for test modules."""

    class Steps:
        Chunk = Chunk
        pack = staticmethod(pack)
        open_session = staticmethod(open_session)
        block_size = BLOCK_SIZE
        vocab_size = VOCAB_SIZE
        architectures = tuple(ARCHITECTURES)

    return Steps
