"""A model that a fake driver executes: its kernels, and its logits computed plainly from a sequence's tokens.

Layers pass tags (`fake_cuda.stand_ins`): `embed` makes one of a token and its position, each layer's attention one of
all before it, `mix` leads from layer to layer, and `head` makes a row of logits of the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from castline.plugins.contract import AttentionAttributes, KvDtypeCode
from castline.plugins.tensorrt.kernel_set import Argument, KernelSet, KernelSpec, attributes_key
from fake_cuda.driver import FakeDriver
from fake_cuda.kernels import HALF, WORD, Call, Reach, Reaches
from fake_cuda.memory import DeviceMemory
from fake_cuda.stand_ins import STAND_INS, Rows, Tags, attend, floats, integers

POINTERS = {
    "rope_append": "qkv cos sin q_weight k_weight pool slots q_out",
    "prefill": "q pool table kv_lens cu_query_lens out",
    "decode": "q pool table kv_lens cu_query_lens out",
    "decode_split": "q pool table kv_lens cu_query_lens partial",
    "decode_merge": "partial cu_query_lens out",
    "greedy": "logits tokens finite",
    "sample": "logits tokens finite temperature top_k top_p min_p uniform",
    "gather_inputs": "sampled source given table kv_lens input_ids positions slots",
    "embed": "input_ids positions qkv",
    "mix": "out qkv",
    "head": "out logits_indices logits",
}
NUMBERS = {
    "rope_append": "num_blocks",
    "prefill": "num_sequences table_width num_blocks",
    "decode": "table_width num_blocks",
    "decode_split": "table_width num_blocks num_splits",
    "decode_merge": "num_splits",
    "gather_inputs": "batch table_width",
    "head": "tokens",
}
ATTENTION = ("rope_append", "prefill", "decode", "decode_split", "decode_merge")


@dataclass(frozen=True)
class FakeModel:
    num_layers: int = 2
    vocab_size: int = 97
    block_size: int = 4
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 8
    multiprocessors: int = 4
    broken: int = 0
    """A row of logits is NaN where its tag is a multiple of this; 0: none."""

    @property
    def attributes(self) -> AttentionAttributes:
        """Of every layer."""
        return AttentionAttributes(
            layer=0,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=1.0,
            block_size=self.block_size,
            kv_dtype=int(KvDtypeCode.FP8),
        )

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.block_size * self.head_dim

    def kernels(self) -> KernelSet:
        heads = {"heads": self.num_heads, "dim": self.head_dim, "padded": 16}
        paged = {**heads, "kv_heads": self.num_kv_heads, "block_size": self.block_size, "kind": 1}
        wide = {"width": (self.num_heads + 2 * self.num_kv_heads) * self.head_dim}
        out = {"narrow": self.num_heads * self.head_dim}
        constants = {
            "rope_append": {**paged, "rotary": 0, "norm": 0},
            "prefill": {**paged, "tile": 8, "queries": 4},
            "decode": {**paged, "tile": 8},
            "decode_split": {**paged, "tile": 8},
            "decode_merge": {**heads, "max_splits": 8},
            "greedy": {"vocab": self.vocab_size},
            "sample": {"vocab": self.vocab_size},
            "gather_inputs": {"block_size": self.block_size, "width": 4},
            "embed": wide,
            "mix": {**wide, **out},
            "head": {**out, "vocab": self.vocab_size, "broken": self.broken},
        }
        return KernelSet("8.9", "none", tuple(self._kernel(name, fixed) for name, fixed in constants.items()))

    def _kernel(self, name: str, constants: dict[str, int]) -> KernelSpec:
        arguments = [Argument(one, "pointer") for one in POINTERS[name].split()]
        arguments += [Argument(one, "i32") for one in NUMBERS.get(name, "").split()]
        key = attributes_key(self.attributes) if name in ATTENTION else ""
        return KernelSpec(name, name, f"{name}.cubin", tuple(arguments), constants, 4, 512, 32, 0, key)  # type: ignore[arg-type]

    def write_kernels(self, directory: Path) -> KernelSet:
        """Files that stand for cubins."""
        kernels = self.kernels()
        for kernel in kernels.kernels:
            (directory / kernel.cubin).write_bytes(image(kernel))
        return kernels

    def driver(self, total_bytes: int = 1 << 30) -> FakeDriver:
        cubins = {image(kernel): kernel for kernel in self.kernels().kernels}
        return FakeDriver(cubins, {**STAND_INS, **MODEL_STAND_INS}, MODEL_REACHES, total_bytes)

    def tags(self, token_ids: Sequence[int]) -> Tags:
        """What the last layer makes of each token."""
        ids = np.array(token_ids, np.uint32)
        tags = embedded(ids, np.arange(len(ids), dtype=np.uint32))
        for layer in range(self.num_layers):
            tags = mixed(tags) if layer else tags
            tags = attend(tags, tags)
        return tags

    def logits(self, tags: Tags) -> NDArray[np.float32]:
        """[tags, vocab_size]: what comes after those tokens."""
        return head_logits(tags, self.vocab_size, self.broken)


def image(kernel: KernelSpec) -> bytes:
    return f"image of {kernel.name}".encode()


def embedded(ids: Tags, positions: Tags) -> Tags:
    return ids * np.uint32(2654435761) + positions * np.uint32(40503) + np.uint32(12345)


def mixed(tags: Tags) -> Tags:
    return (tags ^ (tags >> np.uint32(15))) * np.uint32(0x85EBCA6B) + np.uint32(1)


def head_logits(tags: Tags, vocab_size: int, broken: int) -> NDArray[np.float32]:
    bits = (tags[:, None] ^ (np.arange(vocab_size, dtype=np.uint32) * np.uint32(0x9E3779B1))) * np.uint32(0xC2B2AE35)
    bits = (bits ^ (bits >> np.uint32(13))) * np.uint32(0x27D4EB2F)
    logits = (bits >> np.uint32(8)).astype(np.float32) / np.float32(2**21) - np.float32(4)
    if broken:
        logits[tags % broken == 0, 3] = np.nan
    return logits


def _embed_reach(c: Call) -> Reaches:
    tokens = c.grid[0]
    return {
        "input_ids": Reach(tokens * WORD),
        "positions": Reach(tokens * WORD),
        "qkv": Reach(tokens * c.width * HALF, writes=True),
    }


def _mix_reach(c: Call) -> Reaches:
    return {"out": Reach(c.grid[0] * c.narrow * HALF), "qkv": Reach(c.grid[0] * c.width * HALF, writes=True)}


def _head_reach(c: Call) -> Reaches:
    rows = c.grid[0]
    return {
        "out": Reach(c.tokens * c.narrow * HALF),
        "logits_indices": Reach(rows * WORD),
        "logits": Reach(rows * c.vocab * WORD, writes=True),
    }


def _embed(device: DeviceMemory, c: Call) -> None:
    tokens = c.grid[0]
    ids, positions = integers(device, c.input_ids, tokens), integers(device, c.positions, tokens)
    c.expect((ids >= 0).all(), f"tokens {ids.tolist()}")
    tags = embedded(ids.astype(np.uint32), positions.astype(np.uint32))
    Rows(device, c.qkv, tokens, c.width * HALF, "qkv").write(tags)


def _mix(device: DeviceMemory, c: Call) -> None:
    tags = Rows(device, c.out, c.grid[0], c.narrow * HALF, "out").read()
    Rows(device, c.qkv, c.grid[0], c.width * HALF, "qkv").write(mixed(tags))


def _head(device: DeviceMemory, c: Call) -> None:
    rows = integers(device, c.logits_indices, c.grid[0])
    c.expect(((rows >= 0) & (rows < c.tokens)).all(), f"rows {rows.tolist()} of {c.tokens} tokens")
    tags = Rows(device, c.out, c.tokens, c.narrow * HALF, "out").read()[rows]
    floats(device, c.logits, c.grid[0], c.vocab)[:] = head_logits(tags, c.vocab, c.broken)


MODEL_REACHES = {"embed": _embed_reach, "mix": _mix_reach, "head": _head_reach}
MODEL_STAND_INS = {"embed": _embed, "mix": _mix, "head": _head}
