"""The native kernels of every instruction set against the NumPy reference, over random steps."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castline.plugins.contract import CPU_KV_DTYPES, AttentionAttributes, KvDtypeCode, QkNorm
from castline.plugins.cpu.library import available_isas
from castline.plugins.reference import ReferencePool, paged_attention, round_trip

HEAD_DIMS = (8, 16, 24, 32, 40, 64, 80, 96, 128, 256)


FP8_TOLERANCES = {"amx": 2e-2, "avx512fp16": 2e-2}


def tolerance(kv_dtype: int, isa: str) -> float:
    """Of outputs of size 1: float32 sums, or queries and weights of 16 bits; with fp8 and matrix instructions bf16,
    with AVX512_FP16 sums of halves."""
    if kv_dtype == KvDtypeCode.FP8 and isa in FP8_TOLERANCES:
        return FP8_TOLERANCES[isa]
    wide = kv_dtype == KvDtypeCode.INT8 or (kv_dtype == KvDtypeCode.BF16 and isa == "amx")
    return 3e-4 if wide else 2e-5


@st.composite
def attention_attributes(draw: st.DrawFn) -> AttentionAttributes:
    group = draw(st.sampled_from((1, 2, 3, 4, 8)))
    num_kv_heads = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    rotary_dim = draw(st.sampled_from((0, head_dim, head_dim // 2, 2, head_dim - 2)))
    return AttentionAttributes(
        layer=0,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=draw(st.sampled_from((head_dim**-0.5, 0.5 * head_dim**-0.5))),
        block_size=draw(st.sampled_from((16, 32, 64, 128))),
        kv_dtype=int(draw(st.sampled_from(CPU_KV_DTYPES))),
        window=draw(st.sampled_from((0, 0, 1, 7, 33, 300))),
        softcap=draw(st.sampled_from((0.0, 0.0, 2.0, 30.0))),
        rotary_dim=rotary_dim,
        rope_interleaved=draw(st.integers(0, 1)),
        qk_norm=int(draw(st.sampled_from(QkNorm))),
        norm_eps=draw(st.sampled_from((1e-6, 1e-5))),
        query_tile=draw(st.sampled_from((0, 0, 1, 3, 64))),
        kv_split=draw(st.sampled_from((0, 256, 512))),
    )


# (tokens before the step, tokens of the step) of each sequence; long ones reach a second and third key tile.
SEQUENCES = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 70), st.integers(240, 270), st.integers(500, 620)),
        st.one_of(st.just(0), st.just(1), st.integers(2, 40)),
    ),
    max_size=5,
)


@pytest.mark.parametrize("isa", available_isas())
@settings(max_examples=40, deadline=None, derandomize=True)
@given(attributes=attention_attributes(), lengths=SEQUENCES, seed=st.integers(0, 2**16), threads=st.integers(1, 2))
def test_outputs_and_pool(tools, isa, attributes, lengths, seed, threads) -> None:
    """Any disagreement with the contract: the rounding of K and V to the last bit, attention to float32 rounding."""
    sequences = tools.Sequences(attributes, [before + new for before, new in lengths], seed)
    node = tools.Node(attributes, sequences.num_blocks, isa, threads)
    pool = ReferencePool.zeros(attributes, sequences.num_blocks)
    written = np.zeros(len(pool.k), bool)
    for spans in ([(0, before) for before, _ in lengths], [(before, before + new) for before, new in lengths]):
        step = sequences.step(spans)
        expected = paged_attention(attributes, step, pool)
        output = node(step)
        assert output.shape == expected.shape
        allowed = tolerance(attributes.kv_dtype, isa) * np.abs(expected).max(initial=1.0)
        np.testing.assert_allclose(output, expected, rtol=0, atol=allowed)
        written[step.slot_mapping] = True
    k, v = tools.decode_pool(attributes, node.pool, isa)
    np.testing.assert_array_equal(k[written], pool.k[written])
    np.testing.assert_array_equal(v[written], pool.v[written])


@pytest.mark.parametrize("window", [1, 7, 33])
def test_a_window_that_begins_within_a_block_of_128_int8_keys(tools, window) -> None:
    """V is summed from the start of a block, so the weights of all its keys must have been written, also of those that
    come before every window."""
    attributes = tools.attributes(kv_dtype=int(KvDtypeCode.INT8), block_size=128, window=window)
    sequences = tools.Sequences(attributes, [240])
    step = sequences.step([(0, 240)])
    expected = tools.reference(sequences, step)
    for isa in available_isas():
        node = tools.Node(attributes, sequences.num_blocks, isa)
        np.testing.assert_allclose(node(step), expected, rtol=0, atol=2e-3, err_msg=isa)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kv_dtype", CPU_KV_DTYPES)
def test_extreme_values_round_alike(tools, isa, kv_dtype) -> None:
    """Saturation at fp8's 448, its subnormals, ties, zeros and an all-zero head: all round as the contract says."""
    attributes = tools.attributes(kv_dtype=int(kv_dtype), rotary_dim=0, num_heads=2, head_dim=32)
    sequences = tools.Sequences(attributes, [16])
    special = [0.0, -0.0, 2**-9, 2**-10, 3 * 2**-11, 2**-6, 2**-6 - 2**-12, 447.9, 448.0, 463.9, 1e30, 1.0625, 1.1875]
    values = np.concatenate([special, -np.array(special), np.arange(6) + 0.5]).astype(np.float32)[:32]
    rows = np.stack([np.roll(values, i) for i in range(16)])
    rows[3] = 0.0
    sequences.qkv[0][:, 64:96] = rows  # K of head 0
    sequences.qkv[0][:, 128:160] = rows[::-1]  # V of head 0
    node = tools.Node(attributes, sequences.num_blocks, isa)
    pool = ReferencePool.zeros(attributes, sequences.num_blocks)
    step = sequences.step([(0, 16)])
    paged_attention(attributes, step, pool)
    node(step)
    k, v = tools.decode_pool(attributes, node.pool, isa)
    np.testing.assert_array_equal(k[step.slot_mapping], pool.k[step.slot_mapping])
    np.testing.assert_array_equal(v[step.slot_mapping], pool.v[step.slot_mapping])


@pytest.mark.parametrize("isa", available_isas())
def test_large_scores_do_not_overflow(tools, isa) -> None:
    """A softmax without its maximum taken off overflows at scores of some hundreds, which trained models have."""
    attributes = tools.attributes(scale=100.0, rotary_dim=0)
    sequences = tools.Sequences(attributes, [300], seed=3)
    step = sequences.step([(0, 300)])
    output = tools.Node(attributes, sequences.num_blocks, isa)(step)
    np.testing.assert_allclose(output, tools.reference(sequences, step), rtol=0, atol=2e-3)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kv_dtype", CPU_KV_DTYPES)
def test_many_heads_on_one_kv_head(tools, isa, kv_dtype) -> None:
    """Multi-query attention: a group larger than the rows that a work item aims at."""
    attributes = tools.attributes(num_heads=71, num_kv_heads=1, head_dim=64, rotary_dim=64, kv_dtype=int(kv_dtype))
    sequences = tools.Sequences(attributes, [40, 5])
    step = sequences.step([(0, 40), (0, 5)])
    output = tools.Node(attributes, sequences.num_blocks, isa, threads=2)(step)
    np.testing.assert_allclose(output, tools.reference(sequences, step), rtol=0, atol=tolerance(kv_dtype, isa))


def fp8_values() -> np.ndarray:
    """Every positive value of e4m3: 7 subnormal and 119 normal ones."""
    codes = np.arange(1, 127, dtype=np.uint8)
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("group", [1, 17])
def test_every_fp8_value_of_v_comes_out(tools, isa, group) -> None:
    """Matrix units take subnormal bf16 for 0: an error below the tolerance of random steps. Heads of one strip of rows
    and of two are read by different loops, and the first key of a pair is decoded apart from the second."""
    values = fp8_values()
    row = np.concatenate([values, -values, np.zeros(4, np.float32)])
    attributes = tools.attributes(
        num_heads=group, num_kv_heads=1, head_dim=256, rotary_dim=0, kv_dtype=int(KvDtypeCode.FP8)
    )
    sequences = tools.Sequences(attributes, [2])
    sequences.qkv[0][:] = 0.0  # equal scores: both keys have a weight of exactly 1
    sequences.qkv[0][:, -256:] = row
    output = tools.Node(attributes, sequences.num_blocks, isa)(sequences.step([(0, 2)]))
    np.testing.assert_allclose(output.reshape(2 * group, 256), np.tile(row, (2 * group, 1)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("size", [1e-3, 1e3])
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_the_greatest_fp8_elements_do_not_overflow(tools, isa, head_dim, size) -> None:
    """Sums of halves end at 65504: queries and weights are multiplied by powers of two that must leave room for as many
    products of 448 as a sum takes, and keys whose products have the other sign must not come out equal to them."""
    attributes = tools.attributes(
        num_heads=3, num_kv_heads=1, head_dim=head_dim, scale=1.0, rotary_dim=0, kv_dtype=int(KvDtypeCode.FP8)
    )
    sequences = tools.Sequences(attributes, [300])
    tokens = sequences.qkv[0].reshape(300, 5, head_dim)
    tokens[:, :3] = np.float32(size)
    tokens[:, 3:] = 448.0
    tokens[1::2, 3] = -448.0
    tokens[1::2, 4] = -448.0
    output = tools.Node(attributes, sequences.num_blocks, isa)(sequences.step([(0, 300)]))
    np.testing.assert_allclose(output, np.full_like(output, 448.0), rtol=1e-5)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("group", [1, 17])
@pytest.mark.parametrize("at", [4, 5])
def test_every_fp8_value_of_k_counts(tools, isa, group, at) -> None:
    """As above for K: of two keys one is 0 and one has a single value, a kv head each; queries bring all to a size.
    An even dimension is decoded apart from an odd one."""
    values = fp8_values()
    heads, dim = len(values), 32
    attributes = tools.attributes(
        num_heads=heads * group,
        num_kv_heads=heads,
        head_dim=dim,
        scale=1.0,
        rotary_dim=0,
        kv_dtype=int(KvDtypeCode.FP8),
    )
    sequences = tools.Sequences(attributes, [2])
    tokens = np.zeros((2, (group + 2) * heads, dim), np.float32)
    queries, keys = tokens[:, : group * heads], tokens[:, group * heads : (group + 1) * heads]
    size = np.exp2(np.floor(np.log2(values)))
    queries[1, :, at] = np.repeat(1 / size, group)
    keys[1, :, at] = values
    tokens[1, (group + 1) * heads :] = 1.0
    sequences.qkv[0] = tokens.reshape(2, -1)
    output = tools.Node(attributes, sequences.num_blocks, isa)(sequences.step([(0, 2)]))
    expected = np.repeat(1 / (1 + np.exp(-values / size)), group)
    np.testing.assert_allclose(output[1].reshape(-1, dim)[:, 0], expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kv_dtype", CPU_KV_DTYPES)
@pytest.mark.parametrize("size", [1e-38, 1e-6, 1e9])
def test_equal_keys_weigh_the_same(tools, isa, kv_dtype, size) -> None:
    """Kernels multiply queries by powers of two of their own: one that overflows, or is lost, makes weights differ."""
    attributes = tools.attributes(
        num_heads=6, num_kv_heads=2, head_dim=64, scale=1.0, rotary_dim=0, kv_dtype=int(kv_dtype)
    )
    sequences = tools.Sequences(attributes, [40])
    tokens = sequences.qkv[0].reshape(40, 10, 64)
    tokens[:, :6] *= np.float32(size)
    tokens[:, 6:8] = tokens[0, 6:8]
    output = tools.Node(attributes, sequences.num_blocks, isa)(sequences.step([(0, 40)]))
    values = round_trip(tokens[:, 8:], kv_dtype).mean(axis=0)
    np.testing.assert_allclose(output[39].reshape(2, 3, 64), values[:, None].repeat(3, axis=1), rtol=0, atol=2e-3)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kv_dtype", CPU_KV_DTYPES)
@pytest.mark.parametrize("group", [3, 17])
def test_huge_queries_choose_one_key(tools, isa, kv_dtype, group) -> None:
    """A broken checkpoint's queries of 1e9: floats near their scores are thousands apart, so whatever is added to a
    score is lost, and a maximum that was rounded once more is thousands off: weights overflow, or all of them are 0.
    V of the second and third key tile is larger, so that tiles differ in the unit of their weights."""
    attributes = tools.attributes(
        num_heads=2 * group, num_kv_heads=2, head_dim=64, scale=0.125, rotary_dim=0, kv_dtype=int(kv_dtype)
    )
    sequences = tools.Sequences(attributes, [600], seed=11)
    tokens = sequences.qkv[0].reshape(600, 2 * group + 4, 64)
    tokens[:, : 2 * group] *= np.float32(1e9)
    tokens[256:, 2 * group + 2 :] *= np.float32(50)
    step = sequences.step([(0, 600)])
    expected = tools.reference(sequences, step)
    output = tools.Node(attributes, sequences.num_blocks, isa)(step)
    # Where the two best scores are closer than a query's own rounding, either key is right.
    agree = np.abs(output - expected).reshape(600, 2 * group, 64).max(axis=2) < 2e-3 * 150
    assert agree.mean() > 0.99
