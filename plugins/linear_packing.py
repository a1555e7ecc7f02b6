"""Quantises and packs weights for `castline.plugins.linear`, and unpacks them to what kernels see.

Everything works on blocks of strips, so that a large matrix needs little memory beside its own.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from castline.plugins.linear import K_ALIGNMENT, LINEAR_GROUPS, STRIP, LinearFormat

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]

_BLOCK_ELEMENTS: Final = 1 << 21
_Q4_MAX: Final = 15
_ON_GRID: Final = np.float32(0.02)
"""How far from an integer, in steps of the grid, a weight of a grid can lie through rounding to float32."""


class UnpackableError(ValueError):
    """Weights that a format cannot hold."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Inputs ``weight`` and ``scales`` of a Linear or Embedding node."""

    weight: Bytes
    """[strips, bytes of a strip]"""
    scales: Halves
    """[strips, halves of a strip]"""


def padded_k(k: int) -> int:
    return -(-k // K_ALIGNMENT) * K_ALIGNMENT


def strip_shape(k: int, fmt: LinearFormat, group: int) -> tuple[int, int]:
    """Bytes and halves of one strip."""
    _check_group(fmt, group)
    width = padded_k(k)
    halves = (width // group if group else 1) * STRIP * (2 if fmt == LinearFormat.W4_DM else 1)
    return width * STRIP // (1 if fmt == LinearFormat.W8 else 2), halves


def pack(weight: NDArray[Any], fmt: LinearFormat, group: int) -> PackedWeight:
    """Quantises and packs W [n, k] of any floating dtype.

    W4_DM takes the grid from minimum to maximum of a group, or the exact grid where the group lies on one: weights that
    came out of llama.cpp's Q4_1 are reproduced to the bit. W4 gives -8 to the weight of largest magnitude, as Q4_0, or
    the code that reproduces the group to the bit where there is one; W8 gives it 127. Raises UnpackableError for
    weights that are not finite or whose scale is beyond float16.
    """
    strip_bytes, halves = strip_shape(weight.shape[1], fmt, group)
    strips = -(-len(weight) // STRIP)
    packed = PackedWeight(np.empty((strips, strip_bytes), np.uint8), np.empty((strips, halves), np.float16))
    for rows in _row_blocks(weight.shape):
        quantised, scales = _quantise(np.asarray(weight[rows], np.float32), fmt, group)
        into = slice(rows.start // STRIP, -(-rows.stop // STRIP))
        packed.weight[into], packed.scales[into] = _to_strips(quantised, scales, fmt)
    return packed


def pack_gated(gate: NDArray[Any], up: NDArray[Any], fmt: LinearFormat, group: int) -> PackedWeight:
    """Packs the two matrices [n, k] of a gated node, interleaved by strips."""
    if gate.shape != up.shape:
        raise ValueError(f"gate {gate.shape} and up {up.shape} differ in shape")
    a, b = pack(gate, fmt, group), pack(up, fmt, group)
    return PackedWeight(_interleave(a.weight, b.weight), _interleave(a.scales, b.scales))


def unpack(packed: PackedWeight, n: int, k: int, fmt: LinearFormat, group: int) -> Floats:
    """W [n, k] as kernels see it: the product with the scale is exact, adding m rounds once to float32."""
    out = np.empty((n, k), np.float32)
    for rows in _row_blocks((n, k)):
        strips = slice(rows.start // STRIP, -(-rows.stop // STRIP))
        block = _from_strips(packed.weight[strips], packed.scales[strips], k, fmt, group)
        out[rows] = block[: rows.stop - rows.start, :k]
    return out


def unpack_gated(packed: PackedWeight, n: int, k: int, fmt: LinearFormat, group: int) -> tuple[Floats, Floats]:
    """Gate and up [n, k] of a gated node's weights."""
    gate, up = (PackedWeight(packed.weight[i::2], packed.scales[i::2]) for i in (0, 1))
    return unpack(gate, n, k, fmt, group), unpack(up, n, k, fmt, group)


def grid_error(weight: NDArray[Any], fmt: LinearFormat = LinearFormat.W4_DM) -> float:
    """Relative error (Frobenius norm) of packing W [n, k] as W4_DM or W4, in groups of 32.

    About 0 where W is on such a grid already, and 0 where every weight is reproduced to the bit; infinite where the
    format cannot hold W.
    """
    wrong = total = 0.0
    for rows in _row_blocks(weight.shape):
        block = np.asarray(weight[rows], np.float32)
        try:
            back = unpack(pack(block, fmt, 32), len(block), block.shape[1], fmt, 32)
        except UnpackableError:
            return math.inf
        wrong += float(np.square(back - block, dtype=np.float64).sum())
        total += float(np.square(block, dtype=np.float64).sum())
    return math.sqrt(wrong / total) if total else 0.0


def _check_group(fmt: LinearFormat, group: int) -> None:
    if group not in LINEAR_GROUPS[fmt]:
        raise ValueError(f"format {fmt.name} takes groups of {LINEAR_GROUPS[fmt]}, not {group}")


def _row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    step = max(_BLOCK_ELEMENTS // max(shape[1], 1) // STRIP, 1) * STRIP
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def _interleave(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    return np.stack([a, b], axis=1).reshape(2 * len(a), -1)


# --- quantising ---------------------------------------------------------------------------------------------------


def _quantise(weight: Floats, fmt: LinearFormat, group: int) -> tuple[Bytes, Halves]:
    """Unsigned codes [rows, K'] of whole strips, and scales [rows, G] or, for W4_DM, [rows, G, 2]."""
    if not np.isfinite(weight).all():
        raise UnpackableError("weights are not finite")
    n, k = weight.shape
    # Activations are zero in the padding. W4_DM repeats the last element there, for a zero would widen its range.
    padded = np.pad(weight, ((0, 0), (0, padded_k(k) - k)), "edge" if fmt == LinearFormat.W4_DM and k else "constant")
    padded = np.pad(padded, ((0, -n % STRIP), (0, 0)))
    groups = padded.reshape(len(padded), -1, group or max(padded.shape[1], 1))
    with np.errstate(over="ignore", invalid="ignore"):
        if fmt == LinearFormat.W4_DM:
            codes, scales = _quantise_dm(groups)
        else:
            codes, scales = _quantise_symmetric(groups, fmt)
    if not np.isfinite(scales).all():
        raise UnpackableError(f"weights are too large: a scale of {fmt.name} is beyond float16")
    return codes.reshape(padded.shape), scales


def _quantise_symmetric(groups: Floats, fmt: LinearFormat) -> tuple[Bytes, Halves]:
    largest = np.abs(groups).max(axis=-1, initial=0)
    if fmt == LinearFormat.W8:
        low, high, zero = -127, 127, 128
        scales = (largest / np.float32(127)).astype(np.float16)
    else:
        low, high, zero = -8, 7, 8
        negative = -groups.min(axis=-1, initial=0) == largest
        scales = np.where(negative, largest / np.float32(8), largest / np.float32(-8)).astype(np.float16)
    codes = np.clip(_steps(groups, scales), low, high)
    if fmt == LinearFormat.W4:
        _search_symmetric_grids(groups, codes, scales, largest)
    return (codes + np.float32(zero)).astype(np.uint8), scales


def _search_symmetric_grids(groups: Floats, codes: Floats, scales: Halves, largest: Floats) -> None:
    """Replaces, in place, what is not exact in groups that lie on a grid whose codes do not reach -8: there the largest
    magnitude has a code from 7 down."""
    found = np.argwhere((scales[..., None].astype(np.float32) * codes != groups).any(axis=-1))
    for code in range(7, 0, -1):
        at = tuple(found.T)
        sample, step = groups[at], (largest[at] / np.float32(code)).astype(np.float16)
        steps = _steps(sample, step)
        exact = (step[..., None].astype(np.float32) * steps == sample).all(axis=-1)
        at = tuple(found[exact].T)
        codes[at], scales[at] = steps[exact], step[exact]
        found = found[~exact]


def _quantise_dm(groups: Floats) -> tuple[Bytes, Halves]:
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    m = low.astype(np.float16)
    constant = low == high
    # m + d is nearer to the one value of a constant group than any half is.
    m = np.where(constant & (m > low), np.nextafter(m, np.float16(-np.inf)), m)
    spread = high - m.astype(np.float32)
    d = np.where(constant, spread, spread / np.float32(_Q4_MAX)).astype(np.float16)
    codes = _dm_codes(groups, d, m)
    _search_grids(groups, codes, d, m)
    return codes, np.stack([d, m], axis=-1)


def _search_grids(groups: Floats, codes: Bytes, d: Halves, m: Halves) -> None:
    """Replaces, in place, what is not exact in groups of at most 16 values by the grid that reproduces them best.

    A group of a grid whose codes do not reach both 0 and 15 is taken too coarse or too fine by minimum and maximum. Its
    range is s steps of the grid for some s, and its minimum has some code o.
    """
    error = _dm_error(groups, codes, d, m)
    found = np.argwhere(error > 0)
    values = np.sort(groups[tuple(found.T)], axis=-1)
    found = found[(np.diff(values, axis=-1) != 0).sum(axis=-1) < _Q4_MAX + 1]
    for steps in range(_Q4_MAX, 0, -1):
        at = tuple(found.T)
        sample, low = groups[at], groups[at].min(axis=-1)
        step = ((sample.max(axis=-1) - low) / np.float32(steps)).astype(np.float16)
        distance = _steps(sample - low[:, None], step)
        exact_distance = np.divide(
            sample - low[:, None], step[:, None].astype(np.float32), out=np.zeros_like(sample), where=step[:, None] > 0
        )
        fits = np.abs(distance - exact_distance).max(axis=-1, initial=0) < _ON_GRID
        for offset in range(_Q4_MAX + 1 - steps):
            candidates = found[fits]
            at = tuple(candidates.T)
            minimum = (low[fits] - step[fits].astype(np.float32) * np.float32(offset)).astype(np.float16)
            new_codes = _dm_codes(groups[at], step[fits], minimum)
            new_error = _dm_error(groups[at], new_codes, step[fits], minimum)
            better = new_error < error[at]
            at = tuple(candidates[better].T)
            codes[at], d[at], m[at] = new_codes[better], step[fits][better], minimum[better]
            error[at] = new_error[better]
        found = found[error[tuple(found.T)] > 0]


def _steps(x: Floats, step: Halves) -> Floats:
    """x [..., group] in whole steps; 0 where the step is 0."""
    wide = step[..., None].astype(np.float32)
    out: Floats = np.rint(np.divide(x, wide, out=np.zeros_like(x), where=wide != 0))
    return out


def _dm_codes(groups: Floats, d: Halves, m: Halves) -> Bytes:
    return np.clip(_steps(groups - m[..., None].astype(np.float32), d), 0, _Q4_MAX).astype(np.uint8)


def _dm_error(groups: Floats, codes: Bytes, d: Halves, m: Halves) -> Floats:
    back = d[..., None].astype(np.float32) * codes + m[..., None].astype(np.float32)
    error: Floats = np.abs(back - groups).max(axis=-1)
    return error


# --- layout -------------------------------------------------------------------------------------------------------


def _to_strips(codes: Bytes, scales: Halves, fmt: LinearFormat) -> tuple[Bytes, Halves]:
    strips = len(codes) // STRIP
    if fmt == LinearFormat.W8:
        lines: Bytes = codes.reshape(strips, STRIP, -1, 4)
    else:
        halves = codes.reshape(strips, STRIP, -1, 2, 4)
        lines = halves[:, :, :, 0] | halves[:, :, :, 1] << np.uint8(4)
    columns_last = np.moveaxis(scales.reshape(strips, STRIP, *scales.shape[1:]), 1, -1)
    return lines.transpose(0, 2, 1, 3).reshape(strips, -1), columns_last.reshape(strips, -1)


def _from_strips(weight: Bytes, scales: Halves, k: int, fmt: LinearFormat, group: int) -> Floats:
    """Floats [rows, K'] of whole strips."""
    strips, width = len(weight), padded_k(k)
    lines = weight.reshape(strips, -1, STRIP, 4).transpose(0, 2, 1, 3)
    zero = {LinearFormat.W4_DM: 0, LinearFormat.W4: 8, LinearFormat.W8: 128}[fmt]
    if fmt != LinearFormat.W8:
        lines = np.stack([lines & np.uint8(15), lines >> np.uint8(4)], axis=3)
    groups = width // group if group else 1
    codes = lines.reshape(strips * STRIP, groups, -1).astype(np.float32) - np.float32(zero)
    parts = np.moveaxis(scales.reshape(strips, groups, -1, STRIP), -1, 1).reshape(strips * STRIP, groups, -1)
    out = codes * parts[..., :1].astype(np.float32)
    if fmt == LinearFormat.W4_DM:
        out += parts[..., 1:].astype(np.float32)
    return out.reshape(strips * STRIP, width)
