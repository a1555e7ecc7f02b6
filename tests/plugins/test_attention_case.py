"""Encoding of a GPU's pool: the proofs of its kernels rest on it."""

import numpy as np
import pytest
import torch

from castline.plugins.attention_case import AttentionCase, decode, encode
from castline.plugins.contract import AttentionAttributes, KvDtypeCode
from castline.plugins.reference import round_trip

TYPES = {KvDtypeCode.FP16: torch.float16, KvDtypeCode.BF16: torch.bfloat16, KvDtypeCode.FP8: torch.float8_e4m3fn}


@pytest.mark.parametrize("kv_dtype", TYPES)
def test_elements_are_torchs(kv_dtype: KvDtypeCode) -> None:
    """A mistake here, made twice, would prove a wrong kernel right: torch is the judge."""
    values = np.random.default_rng(0).standard_normal(4000).astype(np.float32) * np.exp2(np.arange(4000) % 18 - 11.0)
    values = round_trip(values.astype(np.float32), int(kv_dtype))
    expected = torch.from_numpy(values).to(TYPES[kv_dtype])
    found = encode(values, int(kv_dtype))
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(torch.uint8).numpy().reshape(-1))
    np.testing.assert_array_equal(decode(found, int(kv_dtype)), values)


@pytest.mark.parametrize("kv_dtype", TYPES)
def test_pool_and_slots_are_each_others_inverse(kv_dtype: KvDtypeCode) -> None:
    """Heads and slots swapped would go unseen where both are random."""
    a = AttentionAttributes(0, 6, 3, 16, 0.25, 4, int(kv_dtype), rotary_dim=16)
    case = AttentionCase(a, num_blocks=100, table_width=10, lengths=[3, 0, 17])
    pool = case.pool()
    assert pool.shape == (100, 2, 3, 4, 16)
    assert pool.flags.c_contiguous
    k, v = case.slots_of(pool)
    np.testing.assert_array_equal(k, case.reference.k)
    np.testing.assert_array_equal(v, case.reference.v)
    np.testing.assert_array_equal(decode(pool[7, 1, 2, 3], int(kv_dtype)), case.reference.v[7 * 4 + 3, 2])


def test_steps_go_on_where_the_sequences_are() -> None:
    a = AttentionAttributes(0, 2, 1, 8, 0.3, 4, int(KvDtypeCode.FP16), rotary_dim=4)
    case = AttentionCase(a, num_blocks=30, table_width=5, lengths=[3, 0])
    inputs = case.inputs([2, 1])
    assert inputs.kv_lens.tolist() == case.lengths == [5, 1]
    slots = [case.table[0, 0] * 4 + 3, case.table[0, 1] * 4, case.table[1, 0] * 4]
    assert inputs.slot_mapping.tolist() == slots
    assert case.expected(inputs).shape == (3, 16)
    assert inputs.cu_query_lens.tolist() == [0, 2, 3]
    with pytest.raises(ValueError, match="do not fit 30 blocks"):
        AttentionCase(a, num_blocks=30, table_width=5, lengths=[0] * 7)
