"""Runs tiny attention nodes through ONNX Runtime and compares them with the reference: does the library work here?"""

from dataclasses import fields
from typing import Final

import numpy as np
import onnxruntime

from castline.engines.errors import EngineError
from castline.plugins.contract import KV_DTYPE_CODES, AttentionAttributes, QkNorm, kv_pool_name
from castline.plugins.cpu.library import PLUGIN_NAME, active_isa, library_path
from castline.plugins.cpu.node_model import block_bytes, serialise_node_model
from castline.plugins.reference import AttentionInputs, ReferencePool, paged_attention

TOLERANCE: Final = 1e-2
"""Of outputs whose size is about 1: a wrong kernel is off by as much, queries rounded to bf16 (fp8 pools) by less."""

_TOKENS: Final = 21
_BLOCKS: Final = 3


def run_self_test() -> None:
    """Raises EngineError naming the KV dtype whose result is wrong; takes some milliseconds."""
    isa = active_isa()
    for name, code in KV_DTYPE_CODES.items():
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
        inputs = _inputs(attributes)
        expected = paged_attention(attributes, inputs, ReferencePool.zeros(attributes, _BLOCKS))
        error = float(np.abs(_run(attributes, inputs) - expected).max())
        if not error <= TOLERANCE:
            raise EngineError(
                f"plugin {PLUGIN_NAME}: the self-test of {name} blocks with the {isa} kernels is off by "
                f"{error:.2g} (at most {TOLERANCE:g} is right); set CASTLINE_ISA to narrower kernels and report the CPU"
            )


def _inputs(a: AttentionAttributes) -> AttentionInputs:
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


def _run(attributes: AttentionAttributes, inputs: AttentionInputs) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library_path()))
    options.intra_op_num_threads = 1
    feeds = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    feeds[kv_pool_name(0)] = np.zeros((_BLOCKS, block_bytes(attributes)), np.uint8)
    try:
        model = serialise_node_model(attributes)
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return np.asarray(session.run(None, feeds)[0])
    except Exception as error:  # onnxruntime's own types share no base but Exception
        raise EngineError(f"plugin {PLUGIN_NAME}: the self-test cannot run: {error}") from error
