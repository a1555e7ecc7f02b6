"""The NumPy reference itself, against torch: its dtypes, its SDPA, and RoPE and norms written the usual way."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from castline.plugins.contract import KvDtypeCode, QkNorm
from castline.plugins.reference import ReferencePool, attend, paged_attention, qk_norm, rope, round_trip

torch.set_num_threads(1)
FINITE = st.floats(-1e6, 1e6, width=32)


@given(arrays(np.float32, st.integers(1, 50), elements=FINITE))
def test_bf16_rounds_as_torch(x) -> None:
    """Truncation, or ties away from zero."""
    expected = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(round_trip(x, KvDtypeCode.BF16), expected)


@given(arrays(np.float32, st.integers(1, 50), elements=st.floats(-1000, 1000, width=32)))
def test_fp8_rounds_as_torch_and_saturates(x) -> None:
    """Double rounding through fp16, lost subnormals, or NaN instead of 448 beyond the range."""
    expected = torch.from_numpy(np.clip(x, -448, 448)).to(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(round_trip(x, KvDtypeCode.FP8), expected)


def test_every_fp8_value_survives() -> None:
    """A step that is wrong at some exponent moves values that are already representable."""
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = values[np.isfinite(values)]
    np.testing.assert_array_equal(round_trip(values, KvDtypeCode.FP8), values)


@given(arrays(np.float32, (3, 16), elements=FINITE))
def test_int8_is_within_half_a_step(x) -> None:
    """A scale over all heads instead of one for each, or a zero head divided by zero."""
    step = np.abs(x).max(axis=1, keepdims=True) / 127
    error = np.abs(round_trip(x, KvDtypeCode.INT8) - x)
    assert (error <= step * 0.5001 + 1e-40).all()  # a scale below float32's normal range has few bits
    np.testing.assert_array_equal(round_trip(np.zeros_like(x), KvDtypeCode.INT8), 0)


@pytest.mark.parametrize("queries", [1, 7, 20])
def test_attention_equals_torch(tools, queries) -> None:
    """A causal mask aligned to the first key instead of the last, or heads of a group mixed up."""
    attributes = tools.attributes(num_heads=6, num_kv_heads=2, scale=0.3)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((queries, 6, 16)).astype(np.float32)
    k, v = rng.standard_normal((2, 20, 2, 16)).astype(np.float32)
    mask = torch.ones(queries, 20, dtype=torch.bool).tril(20 - queries)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(x).transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    np.testing.assert_allclose(attend(attributes, q, k, v), expected[0].transpose(0, 1).numpy(), atol=1e-5)


def test_window_and_softcap(tools) -> None:
    """A window that is off by one, or a cap applied before the scale."""
    attributes = tools.attributes(num_heads=1, num_kv_heads=1, window=3, softcap=2.0, scale=0.5)
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 9, 1, 16)).astype(np.float32) * 3
    out = attend(attributes, q, k, v)
    for p in range(9):
        low = max(0, p - 2)
        scores = 2.0 * np.tanh(k[low : p + 1, 0] @ q[p, 0] * 0.5 / 2.0)
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(out[p, 0], weights @ v[low : p + 1, 0], atol=1e-5)


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rope_equals_the_usual_forms(tools, rotary_dim) -> None:
    """The half style of Llama (rotate_half) and the interleaved one of GPT-J, as complex numbers."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((5, 2, 16)).astype(np.float32)
    angles = rng.uniform(-3, 3, (5, rotary_dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    head = x[..., :rotary_dim]
    rotated = np.concatenate([-head[..., rotary_dim // 2 :], head[..., : rotary_dim // 2]], axis=-1)
    half = head * np.tile(cos, 2)[:, None] + rotated * np.tile(sin, 2)[:, None]
    out = rope(tools.attributes(rotary_dim=rotary_dim), x, cos, sin)
    np.testing.assert_allclose(out[..., :rotary_dim], half, atol=1e-6)
    np.testing.assert_array_equal(out[..., rotary_dim:], x[..., rotary_dim:])

    turned = (head[..., ::2] + 1j * head[..., 1::2]) * np.exp(1j * angles)[:, None]
    out = rope(tools.attributes(rotary_dim=rotary_dim, rope_interleaved=1), x, cos, sin)
    np.testing.assert_allclose(out[..., :rotary_dim:2], turned.real, atol=1e-6)
    np.testing.assert_allclose(out[..., 1:rotary_dim:2], turned.imag, atol=1e-6)


@pytest.mark.parametrize("kind", [QkNorm.PER_HEAD, QkNorm.FULL])
def test_norm_equals_torch(tools, kind) -> None:
    """Qwen3 norms each head by one weight, OLMo 2 all heads together."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((5, 4, 16)).astype(np.float32)
    weight = rng.uniform(0.5, 1.5, 16 if kind == QkNorm.PER_HEAD else 64).astype(np.float32)
    shaped = x if kind == QkNorm.PER_HEAD else x.reshape(5, 64)
    w = torch.from_numpy(weight)
    expected = torch.nn.functional.rms_norm(torch.from_numpy(shaped), w.shape, w, 1e-3).numpy()
    out = qk_norm(tools.attributes(qk_norm=int(kind), norm_eps=1e-3), x, weight)
    np.testing.assert_allclose(out, expected.reshape(x.shape), atol=1e-6)


def test_chunks_equal_one_piece(tools) -> None:
    """K and V of the step are read back from the pool, so that a lossy dtype gives the same for every chunking."""
    sequences = tools.Sequences(tools.attributes(kv_dtype=int(KvDtypeCode.INT8)), [30])
    whole = tools.reference(sequences, sequences.step([(0, 30)]))
    pool = ReferencePool.zeros(sequences.attributes, sequences.num_blocks)
    pieces = [
        paged_attention(sequences.attributes, sequences.step([span]), pool)
        for span in ((0, 7), (7, 8), (8, 8), (8, 30))
    ]
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-6)
