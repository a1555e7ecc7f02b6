"""Packed weights: the layout, and how near the codes come to the weights."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castline.plugins.linear import LINEAR_GROUPS, LinearFormat
from castline.plugins.linear_packing import (
    UnpackableError,
    grid_error,
    pack,
    pack_gated,
    strip_shape,
    unpack,
    unpack_gated,
)

FORMATS = [(fmt, group) for fmt, groups in LINEAR_GROUPS.items() for group in groups]


def grid_weights(seed, n, k, low=0, high=15, ends=True):
    """W [n, k] on random Q4_1 grids, codes low .. high."""
    rng = np.random.default_rng(seed)
    groups = -(-k // 32)
    d = (2.0 ** rng.uniform(-12, 2, (n, groups, 1))).astype(np.float16).astype(np.float32)
    m = (rng.uniform(-100, 100, (n, groups, 1)) * d).astype(np.float16).astype(np.float32)
    q = rng.integers(low, high + 1, (n, groups, 32))
    if ends:
        q[:, :, 0], q[:, :, 1] = low, high
    return (d * q.astype(np.float32) + m).reshape(n, -1)[:, :k]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 40), k=st.integers(2, 200))
def test_a_grid_from_0_to_15_is_reproduced_to_the_bit(seed, n, k) -> None:
    """Weights that came out of Q4_1 must lose nothing: their measured quality is that of the file they came from."""
    weight = grid_weights(seed, n, k)
    packed = pack(weight, LinearFormat.W4_DM, 32)
    np.testing.assert_array_equal(unpack(packed, n, k, LinearFormat.W4_DM, 32), weight)
    assert grid_error(weight) == 0.0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), codes=st.tuples(st.integers(0, 15), st.integers(0, 15)), ends=st.booleans())
def test_a_grid_that_reaches_neither_end_is_reproduced(seed, codes, ends) -> None:
    """Minimum and maximum alone would lay a grid of another step over such a group, half a step wrong; a constant group
    has no step at all."""
    weight = grid_weights(seed, 24, 128, min(codes), max(codes), ends)
    back = unpack(pack(weight, LinearFormat.W4_DM, 32), 24, 128, LinearFormat.W4_DM, 32)
    np.testing.assert_allclose(back, weight, rtol=3e-7, atol=3e-7 * np.abs(weight).max())


def symmetric_weights(seed, n, k, low, high):
    """W [n, k] on random Q4_0 grids, steps of either sign, codes low .. high from the middle."""
    rng = np.random.default_rng(seed)
    d = (2.0 ** rng.uniform(-12, 2, (n, -(-k // 32), 1)) * rng.choice([-1, 1], (n, 1, 1))).astype(np.float16)
    q = rng.integers(low, high + 1, (n, d.shape[1], 32))
    return (d.astype(np.float32) * q.astype(np.float32)).reshape(n, -1)[:, :k]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), ends=st.tuples(st.integers(-8, 7), st.integers(-8, 7)), k=st.integers(1, 200))
def test_a_symmetric_grid_is_reproduced_to_the_bit(seed, ends, k) -> None:
    """Whether its codes reach -8 or not: some quantisers scale by the largest magnitude, others search for the step."""
    weight = symmetric_weights(seed, 24, k, min(ends), max(ends))
    np.testing.assert_array_equal(unpack(pack(weight, LinearFormat.W4, 32), 24, k, LinearFormat.W4, 32), weight)
    assert grid_error(weight, LinearFormat.W4) == 0.0
    assert grid_error(weight) < 1e-3  # a minimum of 7 steps is rounded to float16


def test_a_grid_with_a_minimum_is_not_symmetric() -> None:
    """Taken for symmetric, Q4_1's weights would lose what they have over Q4_0's; one group is enough."""
    assert grid_error(grid_weights(1, 64, 320), LinearFormat.W4) > 0.01
    weight = symmetric_weights(2, 64, 320, -8, 7)
    weight[63, 288:] += np.float32(0.01)
    assert grid_error(weight, LinearFormat.W4) > 0.0


def test_grid_error_tells_grids_from_other_weights() -> None:
    """The builder chooses the default format by it."""
    rng = np.random.default_rng(0)
    assert grid_error(grid_weights(1, 64, 320, 2, 11, ends=False)) < 1e-6
    assert 0.05 < grid_error(rng.standard_normal((64, 320)).astype(np.float32)) < 0.12
    assert grid_error(np.zeros((3, 64), np.float32)) == 0.0
    assert grid_error(np.full((3, 64), 1e6, np.float32)) == np.inf


@pytest.mark.parametrize(("fmt", "group"), FORMATS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 40), k=st.integers(1, 200))
def test_error_is_at_most_half_a_step(fmt, group, seed, n, k) -> None:
    """A wrong scale or a wrong place of an element; and packing twice must change nothing."""
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((n, k)) * np.exp(rng.uniform(-3, 3, (n, 1)))).astype(np.float32)
    packed = pack(weight, fmt, group)
    assert packed.weight.shape == (-(-n // 16), strip_shape(k, fmt, group)[0])
    assert packed.scales.shape == (-(-n // 16), strip_shape(k, fmt, group)[1])
    back = unpack(packed, n, k, fmt, group)
    size = group or k
    for start in range(0, k, size):
        w, b = weight[:, start : start + size], back[:, start : start + size]
        largest = np.abs(w).max(axis=1, keepdims=True)
        step = {
            LinearFormat.W4_DM: (w.max(axis=1, keepdims=True) - w.min(axis=1, keepdims=True)) / 15 / 2,
            LinearFormat.W4: largest / 8,  # the other end's 8 is beyond the code 7
            LinearFormat.W8: largest / 127 / 2,
        }[fmt]
        assert (np.abs(b - w) <= step + 2e-3 * largest + 1e-6).all()
    np.testing.assert_array_equal(unpack(pack(back, fmt, group), n, k, fmt, group), back)


@pytest.mark.parametrize(("fmt", "group"), FORMATS)
def test_layout(fmt, group) -> None:
    """The contract's formulas, element by element: kernels are written from them."""
    n, k = 20, 100
    weight = np.random.default_rng(3).standard_normal((n, k)).astype(np.float32)
    packed = pack(weight, fmt, group)
    back = unpack(packed, n, k, fmt, group)
    groups = 128 // (group or 128)
    for row in range(n):
        strip, column = divmod(row, 16)
        for e in range(k):
            if fmt == LinearFormat.W8:
                q = packed.weight.reshape(2, 32, 16, 4)[strip, e // 4, column, e % 4] - 128.0
            else:
                byte = int(packed.weight.reshape(2, 16, 16, 4)[strip, e // 8, column, e % 4])
                q = float(byte >> 4 if e % 8 >= 4 else byte & 15)
            scales = packed.scales.reshape(2, groups, -1, 16)[strip, e // (group or 128), :, column].astype(np.float32)
            wanted = {
                LinearFormat.W4_DM: lambda q=q, s=scales: s[0] * np.float32(q) + s[1],
                LinearFormat.W4: lambda q=q, s=scales: s[0] * np.float32(q - 8),
                LinearFormat.W8: lambda q=q, s=scales: s[0] * np.float32(q),
            }[fmt]()
            assert back[row, e] == wanted


def test_blocks_of_strips_join(monkeypatch) -> None:
    """A matrix larger than one block of work."""
    weight = np.random.default_rng(4).standard_normal((100, 70)).astype(np.float32)
    whole = pack(weight, LinearFormat.W4_DM, 32)
    monkeypatch.setattr("castline.plugins.linear_packing._BLOCK_ELEMENTS", 70 * 33)
    parts = pack(weight, LinearFormat.W4_DM, 32)
    np.testing.assert_array_equal(parts.weight, whole.weight)
    np.testing.assert_array_equal(parts.scales, whole.scales)


def test_gated_interleaves_strips() -> None:
    """Strip 2i of the gate, strip 2i + 1 of the up-projection, also where the last strip is ragged."""
    rng = np.random.default_rng(5)
    gate, up = rng.standard_normal((2, 40, 64)).astype(np.float32)
    packed = pack_gated(gate, up, LinearFormat.W8, 0)
    np.testing.assert_array_equal(packed.weight[2], pack(gate[16:32], LinearFormat.W8, 0).weight[0])
    np.testing.assert_array_equal(packed.scales[5], pack(up[32:], LinearFormat.W8, 0).scales[0])
    for back, weight in zip(unpack_gated(packed, 40, 64, LinearFormat.W8, 0), (gate, up), strict=True):
        np.testing.assert_allclose(back, weight, atol=0.02)
    with pytest.raises(ValueError, match=r"gate .* and up .* differ"):
        pack_gated(gate, up[:39], LinearFormat.W8, 0)


def test_bad_weights_are_refused() -> None:
    """A NaN, or a scale that float16 cannot hold, would be packed as garbage."""
    weight = np.ones((16, 64), np.float32)
    with pytest.raises(ValueError, match="takes groups of"):
        pack(weight, LinearFormat.W4_DM, 64)
    with pytest.raises(UnpackableError, match="beyond float16"):
        pack(weight * np.float32(1e6), LinearFormat.W4_DM, 32)
    weight[3, 4] = np.nan
    with pytest.raises(UnpackableError, match="not finite"):
        pack(weight, LinearFormat.W8, 0)
