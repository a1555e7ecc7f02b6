"""How a step's arrays are laid out and padded."""

from typing import Any

import numpy as np
import pytest

from castline.plugins.contract import StepTensors
from castline.plugins.cpu.sampling import CHOICE
from castline.runtime.tensorrt.decode_graphs import decode_layout, decode_sizes
from castline.runtime.tensorrt.device_sampler import pack_draws
from castline.runtime.tensorrt.step_inputs import ALIGNMENT, InputLayout, StepSizes, pack_decode, pack_mixed
from castline.runtime.tensorrt.step_rows import runs


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (100, [1, 2, 4, 8, 16, 32, 64, 100])],
)
def test_sizes_double_and_end_with_the_most(most: int, sizes: list[int]) -> None:
    """A batch over the last size would have no graph."""
    assert decode_sizes(most) == sizes


def test_arrays_do_not_overlap_and_are_aligned() -> None:
    """TensorRT takes addresses that are aligned; an overlap is a wrong step."""
    for sizes in (StepSizes(7, 3, 5, 4, 2), StepSizes(64, 64, 1, 64, 64, 64), StepSizes(1, 1, 1, 1, 0)):
        layout = InputLayout.of(sizes)
        ends = 0
        for name, offset in layout.offsets.items():
            assert offset % ALIGNMENT == 0
            assert offset >= ends
            ends = offset + 4 * layout.counts[name]
        assert layout.total >= ends
        assert list(layout.offsets)[-1] == "block_table"
        assert layout.used_bytes(sizes.sequences) <= layout.total


def test_no_layout_is_larger_than_those_of_the_largest_steps() -> None:
    """Buffers are made once, for those."""
    most = max(InputLayout.of(StepSizes(20, 6, 16, 20, 20)).total, decode_layout(6, 16).total)
    for tokens in range(1, 21):
        for sequences in range(1, min(tokens, 6) + 1):
            layout = InputLayout.of(StepSizes(tokens, sequences, 16, tokens, tokens))
            assert layout.total <= most
    assert all(decode_layout(n, 16).total <= most for n in range(1, 7))


def packed(layout: InputLayout) -> tuple[Any, dict[str, Any]]:
    memory = np.full(layout.total, 0xEE, np.uint8)
    return memory, layout.views(memory)


def tensors(count: int) -> StepTensors:
    return StepTensors(
        input_ids=np.arange(10, 10 + count),
        positions=np.arange(5, 5 + count),
        slot_mapping=np.arange(20, 20 + count, dtype=np.int32),
        cu_query_lens=np.arange(count + 1, dtype=np.int32),
        kv_lens=np.arange(6, 6 + count, dtype=np.int32),
        block_table=np.arange(2 * count, dtype=np.int32).reshape(count, 2),
        logits_indices=np.arange(count),
    )


def test_a_decode_is_filled_up_with_sequences_of_no_tokens() -> None:
    """Whatever was in the memory before: a padded row that had a slot or a length would touch somebody's block."""
    layout = decode_layout(4, 3)
    _, into = packed(layout)
    pack_decode(into, tensors(3), layout.sizes, source=None)
    assert into["input_ids"].tolist() == [10, 11, 12, 0]
    assert into["positions"].tolist() == [5, 6, 7, 0]
    assert into["slot_mapping"].tolist() == [20, 21, 22, -1]
    assert into["cu_query_lens"].tolist() == [0, 1, 2, 3, 4]
    assert into["kv_lens"].tolist() == [6, 7, 8, 0]
    assert into["logits_indices"].tolist() == [0, 1, 2, 3]
    assert into["block_table"].reshape(4, 3)[:3, :2].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_step_to_be_completed_has_the_lengths_before_it() -> None:
    """The kernel adds the token that it appends; padding must stay at no tokens."""
    layout = decode_layout(4, 3)
    _, into = packed(layout)
    pack_decode(into, tensors(3), layout.sizes, source=np.array([2, -1, 0], np.int32))
    assert into["kv_lens"].tolist() == [5, 6, 7, 0]
    assert into["source"].tolist() == [2, -1, 0, -1]
    assert into["given"].tolist() == [10, 11, 12, 0]


def test_a_mixed_step_is_packed_as_it_is() -> None:
    layout = InputLayout.of(StepSizes(3, 3, 2, rows=2, drawn=0))
    memory, into = packed(layout)
    pack_mixed(into, tensors(3), np.array([2, 0]))
    assert into["logits_indices"].tolist() == [2, 0]
    assert into["block_table"].tolist() == [0, 1, 2, 3, 4, 5]
    assert into["kv_lens"].tolist() == [6, 7, 8]
    assert memory[layout.offsets["kv_lens"] : layout.offsets["kv_lens"] + 4].view(np.int32)[0] == 6


def test_options_are_numbers_that_a_kernel_takes() -> None:
    """uniform is below 1 as a float32 too, or no token's weight is reached; the rest is greedy."""
    layout = InputLayout.of(StepSizes(4, 4, 1, rows=4, drawn=4))
    _, into = packed(layout)
    draws = np.zeros(2, CHOICE)
    draws["temperature"], draws["top_k"], draws["top_p"] = [0.7, 1e-45], [2**40, 3], [0.9, 1]
    draws["min_p"], draws["uniform"] = [0.1, 0], [1 - 2**-60, 0.25]
    pack_draws(into, draws, np.array([2, 1]), vocab_size=50)
    assert into["temperature"].tolist() == [0, 0, np.float32(0.7), 0]
    assert into["top_k"].tolist() == [0, 3, 50, 0]
    assert into["top_p"].tolist() == [0, 1, np.float32(0.9), 0]
    assert into["min_p"].tolist() == [0, 0, np.float32(0.1), 0]
    assert into["uniform"][1] == 0.25
    assert 0.9999 < into["uniform"][2] < 1


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], []),
        ([4], [(4, 1)]),
        ([0, 1, 2], [(0, 3)]),
        ([2, 1, 0], [(2, 1), (1, 1), (0, 1)]),
        ([5, 6, 0, 1, 3], [(5, 2), (0, 2), (3, 1)]),
    ],
)
def test_rows_are_copied_in_runs(rows: list[int], expected: list[tuple[int, int]]) -> None:
    """In the order that is wanted, whatever it is."""
    assert list(runs(np.array(rows, np.int64))) == expected
