"""Pruning without a GPU: how many kernels fit a multiprocessor, and which candidate the estimate prefers."""

import pytest

from castline.engines.kernel_choices import KernelChoice
from castline.engines.sku import load_sku
from castline.plugins.tensorrt.candidates import Tuned, enough_splits, estimate
from castline.plugins.tensorrt.compile import SHARED_BYTES
from castline.plugins.tensorrt.kernel_set import KernelSpec
from castline.plugins.tensorrt.occupancy import MULTIPROCESSORS, resident_blocks


def spec(registers: int, shared_bytes: int, num_warps: int) -> KernelSpec:
    return KernelSpec("decode", "decode", "", (), {}, num_warps, shared_bytes, registers, 0)


@pytest.mark.parametrize(
    ("capability", "registers", "shared_bytes", "num_warps", "blocks"),
    [
        ((9, 0), 128, 0, 4, 4),  # 65,536 / (128 * 128)
        ((9, 0), 255, 0, 8, 1),  # registers of a warp are given in 256
        ((8, 9), 32, 0, 4, 12),  # 48 warps
        ((8, 9), 32, 48 << 10, 4, 2),  # 100 KiB, 1 KiB of it kept by the system for each
        ((8, 6), 16, 0, 1, 16),  # blocks themselves
        ((9, 0), 64, 227 << 10, 4, 1),
    ],
)
def test_resident_blocks(capability: tuple[int, int], registers: int, shared_bytes: int, num_warps: int,
                         blocks: int) -> None:  # fmt: skip
    """By hand from NVIDIA's table: the limit that binds is the one that counts."""
    assert resident_blocks(capability, registers, shared_bytes, num_warps) == blocks


def test_every_capability_has_its_figures() -> None:
    assert set(MULTIPROCESSORS) == set(SHARED_BYTES)
    for capability, unit in MULTIPROCESSORS.items():
        assert SHARED_BYTES[capability] + 1024 == unit.shared_bytes


def test_decode_wants_loads_in_flight() -> None:
    """The H200 needs 29 KB in flight on each multiprocessor: two copies of 8 KB are too few, of 16 KB enough."""
    sku = load_sku("h200")
    shallow = KernelChoice("decode", 32, 4, 2, "", "fp8", 128)
    deep = KernelChoice("decode", 32, 4, 3, "", "fp8", 128)
    assert estimate(deep, spec(100, 20_000, 4), sku) > estimate(shallow, spec(100, 12_000, 4), sku)
    # Where the memory is slow, what is enough is enough, and fewer stages leave more shared memory to other blocks.
    slow = load_sku("l4")
    assert estimate(shallow, spec(100, 12_000, 4), slow) > estimate(deep, spec(100, 20_000, 4), slow)


def test_prefill_wants_rows_that_share_loads_as_long_as_warps_run() -> None:
    sku = load_sku("rtx4090")
    few, many = (KernelChoice("prefill", 32, 8, 2, "", "fp8", 128, rows=rows) for rows in (32, 128))
    assert estimate(many, spec(128, 40_000, 8), sku) > estimate(few, spec(100, 20_000, 8), sku)
    small, large = (KernelChoice("prefill", 32, 4, 2, "", "fp8", 128, rows=rows) for rows in (64, 128))
    assert estimate(small, spec(128, 30_000, 4), sku) > estimate(large, spec(255, 90_000, 4), sku)


def test_candidates_are_different_and_of_what_is_tuned() -> None:
    for tuned in (Tuned("decode", "fp8", 64), Tuned("prefill", "fp16", 128), Tuned("sample")):
        found = tuned.candidates("why")
        assert len({repr(one) for one in found}) == len(found) > 3
        assert {(one.key, one.chosen) for one in found} == {((tuned.kernel, tuned.kv_dtype, tuned.head_dim), "why")}


@pytest.mark.parametrize(("name", "splits"), [("l4", 16), ("rtx4090", 32), ("h200", 64), ("b200", 64)])
def test_one_sequence_can_fill_the_gpu(name: str, splits: int) -> None:
    """Fewer parts than two waves of eight kv heads need leave multiprocessors idle at batch 1."""
    sku = load_sku(name)
    assert enough_splits(sku) == splits
    assert splits * 8 >= 2 * sku.sm_count * 0.9
