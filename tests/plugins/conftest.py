"""A harness around one attention node, random steps for it, and a decoder of its pool that is written from the layout's
description alone."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from castline.plugins.contract import AttentionAttributes, KvDtypeCode, QkNorm
from castline.plugins.cpu.node_model import block_bytes, serialise_node_model
from castline.plugins.cpu.session import SessionOptions, native_options
from castline.plugins.reference import AttentionInputs, ReferencePool, paged_attention

Floats = NDArray[np.float32]


@contextmanager
def isa_environment(isa: str | None) -> Iterator[None]:
    before = os.environ.pop("CASTLINE_ISA", None)
    if isa is not None:
        os.environ["CASTLINE_ISA"] = isa
    try:
        yield
    finally:
        os.environ.pop("CASTLINE_ISA", None)
        if before is not None:
            os.environ["CASTLINE_ISA"] = before


def open_session(model: bytes, threads: int = 1) -> onnxruntime.InferenceSession:
    options = native_options(SessionOptions(num_threads=threads))
    options.log_severity_level = 4  # fatal: errors are what some tests are about
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Node:
    """One attention node in an ONNX Runtime session of its own, with its pool."""

    def __init__(self, attributes: AttentionAttributes, num_blocks: int, isa: str | None = None, threads: int = 1):
        with isa_environment(isa):
            self.session = open_session(serialise_node_model(attributes), threads)
        # 0xff is NaN in every floating dtype: whatever the kernel reads without having written it shows.
        self.pool = np.full((num_blocks, block_bytes(attributes)), 0xFF, np.uint8)

    def __call__(self, inputs: AttentionInputs, **overrides: NDArray[np.generic]) -> Floats:
        feeds = {name: getattr(inputs, name) for name in AttentionInputs.__slots__}
        feeds = {name: value for name, value in feeds.items() if value is not None}
        return self.session.run(None, feeds | {"kv_pool.0": self.pool} | overrides)[0]


@dataclass
class Sequences:
    """The block tables of some sequences and the random inputs of their steps.

    The data of a token depends on (seed, sequence, position) alone, so that it is the same however tokens are chunked.
    """

    attributes: AttentionAttributes
    capacity: Sequence[int]
    seed: int = 0
    spare_blocks: int = 2
    block_table: NDArray[np.int32] = field(init=False)
    num_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        counts = [-(-n // self.attributes.block_size) for n in self.capacity]
        self.num_blocks = sum(counts) + self.spare_blocks
        ids = rng.permutation(self.num_blocks)
        self.block_table = np.full((len(counts), max(counts, default=0)), -9, np.int32)
        for row, count, end in zip(self.block_table, counts, np.cumsum(counts), strict=True):
            row[:count] = ids[end - count : end]
        a = self.attributes
        width = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
        self.qkv = [rng.standard_normal((n, width)).astype(np.float32) for n in self.capacity]
        self.angles = [rng.uniform(-3, 3, (n, a.rotary_dim // 2)).astype(np.float32) for n in self.capacity]
        norm = a.head_dim if a.qk_norm == QkNorm.PER_HEAD else 0
        self.weights = [
            rng.uniform(0.5, 1.5, norm or heads * a.head_dim).astype(np.float32)
            for heads in (a.num_heads, a.num_kv_heads)
        ]

    def step(self, spans: Sequence[tuple[int, int]], order: Sequence[int] | None = None) -> AttentionInputs:
        """Inputs that compute tokens start .. stop of each sequence; *order* names the sequences, all by default."""
        order = range(len(spans)) if order is None else order
        a = self.attributes
        tokens = [(s, p) for s, (start, stop) in zip(order, spans, strict=True) for p in range(start, stop)]

        def rows(arrays: Sequence[Floats], width: int) -> Floats:
            return np.array([arrays[s][p] for s, p in tokens], np.float32).reshape(len(tokens), width)

        slots = [self.block_table[s, p // a.block_size] * a.block_size + p % a.block_size for s, p in tokens]
        angles = rows(self.angles, a.rotary_dim // 2)
        norm, rope = a.qk_norm != QkNorm.NONE, a.rotary_dim > 0
        return AttentionInputs(
            qkv=rows(self.qkv, (a.num_heads + 2 * a.num_kv_heads) * a.head_dim),
            slot_mapping=np.array(slots, np.int32),
            cu_query_lens=np.cumsum([0, *(stop - start for start, stop in spans)]).astype(np.int32),
            kv_lens=np.array([stop for _, stop in spans], np.int32),
            block_table=np.ascontiguousarray(self.block_table[list(order)]),
            cos=np.cos(angles) if rope else None,
            sin=np.sin(angles) if rope else None,
            q_norm_weight=self.weights[0] if norm else None,
            k_norm_weight=self.weights[1] if norm else None,
        )


def e4m3_codes(pool: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What the pool of the matrix kernels holds of fp8 (plugins/cpu/native/fp8_bf16.h), as e4m3's own codes."""
    small = np.array([0, 4, 2, 5, 3, 6, 1, 7], np.uint8)  # by what is held
    return np.where(pool & 0x78 == 0, pool & 0x80 | small[pool & 7], pool ^ 1)


def decode_pool(attributes: AttentionAttributes, pool: NDArray[np.uint8], isa: str) -> tuple[Floats, Floats]:
    """K and V of every slot, [num_slots, num_kv_heads, head_dim], from the layout in plugins/cpu/native/layout.h, as
    the kernels of *isa* write it."""
    a = attributes
    blocks, heads, n, dim = len(pool), a.num_kv_heads, a.block_size, a.head_dim
    dtype: type[np.generic] = {
        KvDtypeCode.FP32: np.float32,
        KvDtypeCode.BF16: ml_dtypes.bfloat16,
        KvDtypeCode.INT8: np.int8,
        KvDtypeCode.FP8: ml_dtypes.float8_e4m3fn,
    }[KvDtypeCode(a.kv_dtype)]
    size = heads * n * dim * np.dtype(dtype).itemsize
    if a.kv_dtype == KvDtypeCode.FP8 and isa == "amx" and dim >= 32:
        pool = e4m3_codes(pool)
    k_bytes, v_bytes, scales = pool[:, :size], pool[:, size : 2 * size], pool[:, 2 * size :]
    k = np.ascontiguousarray(k_bytes).view(dtype)
    v = np.ascontiguousarray(v_bytes).view(dtype)
    beside = {KvDtypeCode.FP32: 1, KvDtypeCode.INT8: 4}.get(KvDtypeCode(a.kv_dtype), 2)
    k = k.reshape(blocks, heads, dim // beside, n, beside).transpose(0, 3, 1, 2, 4).reshape(blocks * n, heads, dim)
    v = v.reshape(blocks, heads, n // beside, dim, beside).transpose(0, 2, 4, 1, 3).reshape(blocks * n, heads, dim)
    k, v = k.astype(np.float32), v.astype(np.float32)
    if a.kv_dtype == KvDtypeCode.INT8:
        scale = np.ascontiguousarray(scales).view(np.float32).reshape(blocks, 2, heads, n)
        scale = scale.transpose(1, 0, 3, 2).reshape(2, blocks * n, heads, 1)
        k, v = k * scale[0], v * scale[1]
    return k, v


@dataclass
class Tools:
    """What the tests of this folder share."""

    Node: type[Node] = Node
    Sequences: type[Sequences] = Sequences
    decode_pool: Callable[[AttentionAttributes, NDArray[np.uint8], str], tuple[Floats, Floats]] = decode_pool
    session: Callable[[bytes], onnxruntime.InferenceSession] = open_session
    isa: Callable[[str | None], AbstractContextManager[None]] = isa_environment

    @staticmethod
    def attributes(**changes: float) -> AttentionAttributes:
        """A small node: 4 heads over 2 kv heads of 16, blocks of 16, fp32, half-style RoPE on all of a head."""
        defaults = {
            "layer": 0,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "scale": 0.25,
            "block_size": 16,
            "kv_dtype": int(KvDtypeCode.FP32),
            "rotary_dim": 16,
        }
        return AttentionAttributes(**(defaults | changes))  # type: ignore[arg-type]

    @staticmethod
    def reference(sequences: Sequences, *steps: AttentionInputs) -> Floats:
        """Output of the last of *steps*, from the reference, over a fresh pool."""
        pool = ReferencePool.zeros(sequences.attributes, sequences.num_blocks)
        return [paged_attention(sequences.attributes, step, pool) for step in steps][-1]


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools()
