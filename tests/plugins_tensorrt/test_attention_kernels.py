"""The attention kernels against the reference of the node, in the interpreter."""

import numpy as np
import pytest

from castline.plugins.contract import KvDtypeCode, QkNorm
from castline.plugins.tensorrt.kernels.elements import E4M3, E4M3_INTEGER, PLAIN

KINDS = [(KvDtypeCode.FP16, PLAIN.value), (KvDtypeCode.FP8, E4M3.value), (KvDtypeCode.FP8, E4M3_INTEGER.value)]
TOLERANCE = 4e-3


def check(case, steps) -> None:
    for query_lens in steps:
        expected, found = case.step(query_lens)
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    expected, found = case.stored()
    # fp8: half a step of a value that the GPU's float32 arithmetic rounded to the other side of a tie
    unequal = np.abs(found - expected) > 1e-3 * np.abs(expected) + 1e-6
    assert unequal.mean() < 0.002


@pytest.mark.parametrize(("dtype", "kind"), KINDS)
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_groups_and_blocks(kernels, dtype, kind, block_size, group) -> None:
    """A wrong row, block or head: mixed steps of prefill chunks, decodes, 0-token rows, over shuffled blocks."""
    attributes = kernels.attributes(num_heads=group * 2, num_kv_heads=2, block_size=block_size, kv_dtype=int(dtype))
    case = kernels.Case(attributes, kind=kind, lengths=[60, 0, 31], tile=64)
    check(case, [[9, 1, 0], [1, 3, 1]])


@pytest.mark.parametrize("window", [1, 7, 40])
@pytest.mark.parametrize(("dtype", "kind"), KINDS)
def test_windows(kernels, window, dtype, kind) -> None:
    """Keys outside the window must weigh nothing, also where the window ends inside a tile."""
    case = kernels.Case(kernels.attributes(window=window, kv_dtype=int(dtype)), kind=kind, lengths=[0, 70], tile=16)
    check(case, [[20, 3], [1, 1]])


@pytest.mark.parametrize("changes", [
    {"softcap": 20.0, "scale": 1.0},
    {"qk_norm": int(QkNorm.PER_HEAD)},
    {"qk_norm": int(QkNorm.FULL), "num_heads": 6, "num_kv_heads": 2},
    {"rope_interleaved": 1},
    {"rotary_dim": 16},
    {"rotary_dim": 0},
    {"head_dim": 80, "rotary_dim": 32},
    {"head_dim": 96, "rotary_dim": 96},
    {"head_dim": 128, "rotary_dim": 128, "scale": 128**-0.5},
], ids=str)  # fmt: skip
def test_attributes(kernels, changes) -> None:
    """Every attribute of the contract: soft-cap, QK-norms, RoPE's styles, partial RoPE, heads of no power of two."""
    case = kernels.Case(kernels.attributes(**changes), lengths=[0, 40])
    check(case, [[9, 5], [1, 1]])


@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("queries", [4, 16])
def test_tiles_change_nothing(kernels, tile, queries) -> None:
    """The tuner's choices may change the time of a step and nothing else."""
    case = kernels.Case(kernels.attributes(), lengths=[0, 60], tile=tile, queries=queries)
    check(case, [[18, 5], [1, 1]])


@pytest.mark.parametrize("group", [1, 8])
def test_bf16_pool(kernels, group) -> None:
    """bf16 blocks, of numbers that the type has, read by fp16 queries. Triton's interpreter cuts bf16 instead of
    rounding it and multiplies it wrongly: its rounding and queries of bf16 wait for a GPU."""
    attributes = kernels.attributes(num_heads=2 * group, kv_dtype=int(KvDtypeCode.BF16), block_size=32, rotary_dim=0)
    case = kernels.Case(attributes, lengths=[60, 0, 31])
    check(case, [[9, 1, 0], [1, 3, 1]])


@pytest.mark.parametrize(("block_size", "group"), [(32, 3), (64, 8)])
def test_windows_over_ragged_rows(kernels, block_size, group) -> None:
    """A window that begins inside a block and inside a tile, for chunks, single tokens and rows of none at once."""
    attributes = kernels.attributes(
        num_heads=2 * group, block_size=block_size, window=37, kv_dtype=int(KvDtypeCode.FP8)
    )
    case = kernels.Case(attributes, lengths=[90, 0, 36, 37, 5])
    check(case, [[11, 1, 1, 0, 40], [1, 0, 1, 1, 2]])


def test_padding_rows_write_nowhere(kernels) -> None:
    """A decode graph is padded to its bucket with rows of length 0: they must not touch the pool."""
    case = kernels.Case(kernels.attributes(), lengths=[0, 0])
    case.step([5, 3])
    before = case.pool.clone()
    inputs = case._inputs([1, 1])
    inputs.slot_mapping[1] = -1
    case._run(inputs)
    changed = (case.pool != before).any(-1).any(1).any(1)
    assert changed.sum() == 1
