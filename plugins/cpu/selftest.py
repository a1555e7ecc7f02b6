"""Runs tiny nodes through ONNX Runtime and compares them with the references: does the library work here?"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from castline.engines.errors import EngineError
from castline.plugins.contract import CPU_KV_DTYPES, AttentionAttributes, KvDtypeCode, QkNorm, kv_pool_name
from castline.plugins.cpu.library import PLUGIN_NAME, active_isa, has_wide_kernels
from castline.plugins.cpu.linear_model import (
    IDS,
    SCALES,
    WEIGHT,
    linear_feeds,
    serialise_embedding_model,
    serialise_linear_model,
)
from castline.plugins.cpu.node_model import block_bytes, serialise_node_model
from castline.plugins.cpu.session import SessionOptions, native_options
from castline.plugins.linear import (
    LINEAR_GROUPS,
    Activation,
    EmbeddingAttributes,
    LinearAttributes,
    LinearFormat,
)
from castline.plugins.linear_packing import PackedWeight, pack, pack_gated
from castline.plugins.linear_reference import LinearInputs, embedding, linear
from castline.plugins.reference import AttentionInputs, ReferencePool, paged_attention

ATTENTION_TOLERANCES: Final = {
    KvDtypeCode.FP32: 1e-5,
    KvDtypeCode.BF16: 1e-4,
    KvDtypeCode.INT8: 5e-4,
    KvDtypeCode.FP8: 1e-2,
}
"""Of outputs whose size is about 1, where a wrong kernel is off by as much. What kernels may round: nothing; to two
bf16 each, queries and weights; to integers of 16 bits; to one bf16 (measured 0.003 under amx)."""
LINEAR_TOLERANCE: Final = 1e-3
WIDE_TOLERANCE: Final = 3e-2
"""Of wide linear kernels, which may round weights to bf16."""

_TOKENS: Final = 21
_BLOCKS: Final = 3

Floats = NDArray[np.float32]


def run_self_test() -> None:
    """Raises EngineError naming the KV dtype or the format whose result is wrong; takes some milliseconds."""
    for code in CPU_KV_DTYPES:
        _test_attention(code)
    for fmt, groups in LINEAR_GROUPS.items():
        for group in groups:
            _test_linear(fmt, group)
    _test_embedding()


def _test_attention(code: KvDtypeCode) -> None:
    attributes = AttentionAttributes(
        layer=0,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        scale=32**-0.5,
        block_size=16,
        kv_dtype=int(code),
        rotary_dim=32,
        qk_norm=int(QkNorm.PER_HEAD),
    )
    inputs = _attention_inputs(attributes)
    expected = paged_attention(attributes, inputs, ReferencePool.zeros(attributes, _BLOCKS))
    feeds = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    feeds[kv_pool_name(0)] = np.zeros((_BLOCKS, block_bytes(attributes)), np.uint8)
    what = f"{code.name.lower()} blocks"
    _compare(what, serialise_node_model(attributes), feeds, expected, ATTENTION_TOLERANCES[code])


def _test_linear(fmt: LinearFormat, group: int) -> None:
    """The narrow kernels, then, where the host has them, the wide ones."""
    rng = np.random.default_rng(0)
    k, n = 96, 40
    gate, up = (rng.standard_normal((2, n, k)) / np.sqrt(k)).astype(np.float32)
    packed = pack_gated(gate, up, fmt, group)
    inputs = LinearInputs(
        x=rng.standard_normal((_TOKENS, k)).astype(np.float32),
        norm_weight=rng.uniform(0.5, 1.5, k).astype(np.float32),
        bias=rng.standard_normal((2, n)).astype(np.float32),
        residual=rng.standard_normal((_TOKENS, n)).astype(np.float32),
    )
    for wide in (False, True) if has_wide_kernels() else (False,):
        attributes = LinearAttributes(
            k=k,
            n=n,
            format=int(fmt),
            group=group,
            activation=int(Activation.SILU),
            gated=1,
            norm=1,
            wide_rows=1 if wide else -1,
        )
        what = f"{fmt.name} weights in groups of {group} ({'wide' if wide else 'narrow'})"
        model = serialise_linear_model(attributes, bias=True, residual=True)
        expected = linear(attributes, inputs, packed, wide=wide)
        tolerance = WIDE_TOLERANCE if wide else LINEAR_TOLERANCE
        _compare(what, model, linear_feeds(inputs, packed), expected, tolerance)


def _test_embedding() -> None:
    weight = np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32)
    packed: PackedWeight = pack(weight, LinearFormat.W8, 0)
    attributes = EmbeddingAttributes(k=96, n=40, format=int(LinearFormat.W8), group=0)
    ids = np.arange(39, -1, -2)
    feeds: dict[str, NDArray[Any]] = {IDS: ids, WEIGHT: packed.weight, SCALES: packed.scales}
    _compare("the embedding", serialise_embedding_model(attributes), feeds, embedding(attributes, ids, packed), 0.0)


def _attention_inputs(a: AttentionAttributes) -> AttentionInputs:
    rng = np.random.default_rng(0)
    angles = rng.uniform(-3, 3, (_TOKENS, a.rotary_dim // 2)).astype(np.float32)
    width = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    return AttentionInputs(
        qkv=rng.standard_normal((_TOKENS, width)).astype(np.float32),
        slot_mapping=np.arange(_TOKENS, dtype=np.int32) + a.block_size,
        cu_query_lens=np.array([0, _TOKENS], np.int32),
        kv_lens=np.array([_TOKENS], np.int32),
        block_table=np.array([[1, 2]], np.int32),
        cos=np.cos(angles),
        sin=np.sin(angles),
        q_norm_weight=rng.uniform(0.5, 1.5, a.head_dim).astype(np.float32),
        k_norm_weight=rng.uniform(0.5, 1.5, a.head_dim).astype(np.float32),
    )


def _compare(what: str, model: bytes, feeds: Mapping[str, NDArray[Any]], expected: Floats, tolerance: float) -> None:
    isa = active_isa()
    error = float(np.abs(_run(model, feeds) - expected).max())
    if not error <= tolerance:
        raise EngineError(
            f"plugin {PLUGIN_NAME}: the self-test of {what} with the {isa} kernels is off by {error:.2g} (at most "
            f"{tolerance:g} is right); set CASTLINE_ISA to narrower kernels and report the CPU"
        )


def _run(model: bytes, feeds: Mapping[str, NDArray[Any]]) -> Floats:
    options = native_options(SessionOptions(num_threads=1))
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return np.asarray(session.run(None, dict(feeds))[0])
    except Exception as error:  # onnxruntime's own types share no base but Exception
        raise EngineError(f"plugin {PLUGIN_NAME}: the self-test cannot run: {error}") from error
