// Operands of the tile kernels: queries on the left, K and V of a key tile on the right. Included by kernel_amx.cpp.
//
// A right operand has one word of 32 bits for each column and step of the sum: the pool's own layout (layout.h), so K
// and V are taken from the pool as they lie. Where they cannot be, they are copied to a panel first: fp8, which becomes
// bf16; dimensions that do not fill a register (bf16: what lies beyond may be NaN); keys of V outside the tile's range,
// or in blocks too small for a step.
#pragma once

#include "fp8_bf16.h"
#include "softmax16.h"
#include "tiles.h"

namespace castline::CASTLINE_ISA {
namespace {

constexpr int kStrip = 16;  // rows of one left operand; a right one has kGroup keys of K or dimensions of V

template <KvDtype T>
constexpr int kWordElements = T == kInt8 ? 4 : 2;  // elements of a word of an operand
template <KvDtype T>
constexpr int kStep = kDepth * kWordElements<T>;  // dimensions of one step of q.k, keys of one step of P.V
// Parts of a left operand. int8: 16 bits as a high and a low byte, whose sums are kept apart; bf16: 16 bits of mantissa
// as the sum of two bf16; fp8, which is itself coarser than that: one bf16.
template <KvDtype T>
constexpr int kPlanes = T == kFp8 ? 1 : 2;
template <KvDtype T>
constexpr int kSumPlanes = T == kInt8 ? 2 : 1;

constexpr int round_up(int x, int step) { return (x + step - 1) / step * step; }

// Right operands of one key tile. K: group g begins at k[g], step s of the dimensions kDepth * k_stride bytes further.
// V: step s of the keys begins at v[s], group j of the dimensions kTileBytes further.
struct RightOperands {
  const uint8_t* k[kKeyTile / kGroup];
  const uint8_t* v[kKeyTile / (2 * kDepth)];
  ptrdiff_t k_stride, v_stride;
};

template <KvDtype T>
constexpr size_t k_panel_bytes(int head_dim) {
  return T == kInt8 ? 0 : static_cast<size_t>(kKeyTile) * round_up(head_dim, kStep<T>) * 2;
}
template <KvDtype T>
constexpr size_t v_panel_bytes(int head_dim) {
  return static_cast<size_t>(kKeyTile) / kWordElements<T> * round_up(head_dim, kGroup) * 4;
}

// Bytes of a word in the pool.
template <KvDtype T>
constexpr int kPoolWord = T == kFp8 ? 2 : 4;

// The first *words* words of *from*, in the pool's form, as words of an operand; zeros up to *padded*, a multiple of
// 16. Of each word the bits *keep* are kept.
template <KvDtype T>
void copy_words(const uint8_t* from, int words, int padded, uint32_t keep, uint8_t* out) {
  const Int kept = _mm512_set1_epi32(static_cast<int32_t>(keep));
  if constexpr (T == kFp8) {
    const Bf16OfFp8 bf16;
    for (int w = 0; w < padded; w += 32) {
      const Bf16Halves x = bf16(_mm512_maskz_loadu_epi16(words_below(words - w), from + w * 2));
      _mm512_storeu_si512(out + w * 4, _mm512_and_si512(x.first, kept));
      if (w + 16 < padded) _mm512_storeu_si512(out + w * 4 + 64, _mm512_and_si512(x.second, kept));
    }
    return;
  }
  int w = 0;
  for (; keep == ~0u && w + 16 <= words; w += 16) _mm512_storeu_si512(out + w * 4, load_words(from + w * 4));
  for (; w < padded; w += 16) {
    const Int x = _mm512_maskz_loadu_epi32(lanes_below(words - w), from + w * 4);
    _mm512_storeu_si512(out + w * 4, _mm512_and_si512(x, kept));
  }
}

template <KvDtype T>
void make_keys(const TileBlocks& tile, int head_dim, uint8_t* panel, RightOperands* out) {
  const int n = tile.block_size;
  const bool direct = T == kInt8 || (T == kBf16 && head_dim % kStep<T> == 0);
  const int rows = round_up(head_dim, kStep<T>) / kWordElements<T>, filled = head_dim / kWordElements<T>;
  const int first_block = tile.first_key / n, last_block = (tile.last_key - 1) / n;
  for (int b = first_block; b <= last_block && !direct; ++b) {
    uint8_t* block = panel + b * rows * n * 4;
    copy_words<T>(tile.block[b].k, filled * n, filled * n, ~0u, block);
    memset(block + filled * n * 4, 0, (rows - filled) * n * 4);
  }
  out->k_stride = n * 4;
  // Groups outside the range are never used, but loaded with their neighbours: any address of the pool will do.
  for (int g = 0; g < kKeyTile / kGroup; ++g) {
    int b = g * kGroup / n;
    b = b < first_block ? first_block : b > last_block ? last_block : b;
    out->k[g] = (direct ? tile.block[b].k : panel + b * rows * n * 4) + g * kGroup % n * 4;
  }
}

// One step of V, copied: zeros for the keys outside the tile's range, whose weight is 0 but which may be NaN.
template <KvDtype T>
void copy_values(const TileBlocks& tile, int head_dim, int padded, int step, uint8_t* out) {
  constexpr int kBeside = kWordElements<T>;
  const int n = tile.block_size;
  for (int row = 0; row < kDepth; ++row, out += padded * 4) {
    const int key = step * kStep<T> + row * kBeside;
    uint32_t keep = ~0u;
    for (int i = 0; i < kBeside; ++i) {
      constexpr int kBits = 32 / kBeside;
      if (key + i < tile.first_key || key + i >= tile.last_key) keep &= ~((~0u >> (32 - kBits)) << i * kBits);
    }
    const uint8_t* from = keep == 0 ? nullptr : tile.block[key / n].v + key % n / kBeside * head_dim * kPoolWord<T>;
    copy_words<T>(from, keep == 0 ? 0 : head_dim, padded, keep, out);
  }
}

template <KvDtype T>
void make_values(const TileBlocks& tile, int head_dim, uint8_t* panel, RightOperands* out) {
  const int padded = round_up(head_dim, kGroup);
  const bool direct = T != kFp8 && padded == head_dim && tile.block_size >= kStep<T>;
  out->v_stride = padded * 4;
  for (int s = tile.first_key / kStep<T>; s * kStep<T> < tile.last_key; ++s) {
    const int key = s * kStep<T>;
    if (direct && key >= tile.first_key && key + kStep<T> <= tile.last_key) {
      out->v[s] = tile.block[key / tile.block_size].v + key % tile.block_size / kWordElements<T> * padded * 4;
    } else {
      uint8_t* copy = panel + s * kDepth * padded * 4;
      copy_values<T>(tile, head_dim, padded, s, copy);
      out->v[s] = copy;
    }
  }
}

// --- the left operand: queries ---------------------------------------------------------------------------------------

// Bytes of the queries of one strip of rows: [step][plane][row][kTileBytes].
template <KvDtype T>
constexpr size_t strip_query_bytes(int head_dim) {
  return static_cast<size_t>(round_up(head_dim, kStep<T>)) / kStep<T> * kPlanes<T> * kStrip * kTileBytes;
}

constexpr int kPlaneBytes = kStrip * kTileBytes;

// Thirty-two floats as bf16 planes, *apart* bytes from each other.
template <KvDtype T>
CASTLINE_INLINE void store_bf16(const Vec x[2], uint8_t* out, ptrdiff_t apart) {
  const Int high = (Int)_mm512_cvtne2ps_pbh(x[1], x[0]);
  _mm512_storeu_si512(out, high);
  if constexpr (kPlanes<T> == 2) {
    const Vec first = as_float(shift_left<16>(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(high))));
    const Vec second = as_float(shift_left<16>(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(high, 1))));
    _mm512_storeu_si512(out + apart, (Int)_mm512_cvtne2ps_pbh(_mm512_sub_ps(x[1], second), _mm512_sub_ps(x[0], first)));
  }
}

// Packs q * scale as row *row* of its strip. Returns what a score of the row is to be multiplied by.
template <KvDtype T>
float pack_query(const float* q, int head_dim, float scale, int row, uint8_t* strip) {
  uint8_t* out = strip + row * kTileBytes;
  const int padded = round_up(head_dim, kStep<T>);
  if constexpr (T == kInt8) {
    int8_t high[kMaxHeadDim], low[kMaxHeadDim];
    int32_t sum;
    const float multiplier = query_planes(q, head_dim, padded, scale, high, low, &sum);
    for (int d = 0; d < padded; d += kTileBytes, out += 2 * kPlaneBytes) {
      memcpy(out, high + d, kTileBytes);
      memcpy(out + kPlaneBytes, low + d, kTileBytes);
    }
    return multiplier;
  }
  for (int d = 0; d < padded; d += 2 * kLanes, out += kPlanes<T> * kPlaneBytes) {
    Vec x[2];
    for (int i = 0; i < 2; ++i) {
      const int at = d + i * kLanes;
      x[i] = mul(_mm512_maskz_loadu_ps(lanes_below(head_dim - at), q + at), broadcast(scale));
      if (T == kFp8) x[i] = mul(x[i], broadcast(kFp8Query));
    }
    store_bf16<T>(x, out, kPlaneBytes);
  }
  return T == kFp8 ? kFp8Score : 1.0f;
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
