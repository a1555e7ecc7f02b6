// Softmax of one row of a strip over one key tile, from the tile kernels' scores to their weights. Included by
// tile_attend.h only.
//
// Weights are the left operand of P.V. bf16 and fp8: as queries are. int8: V's scale times the weight, as unsigned integers of 16
// bits in two planes; the row's softmax is taken relative to its maximum less a whole power of two, which is chosen so
// that the greatest weight that its keys could have is near 2^16.
#pragma once

#include "tile_operands.h"

namespace castline::CASTLINE_ISA {
namespace {

// Strides are no multiple of 1024 bytes: the rows of a strip would share few sets of the cache.
template <KvDtype T>
constexpr int kScoreStride = kKeyTile * 4 * kSumPlanes<T> + 64;  // [group][plane][kGroup], 32 bits each
template <KvDtype T>
constexpr int kWeightStride = kKeyTile / kStep<T> * kPlanes<T> * kTileBytes + 64;  // [step][plane][kTileBytes]

// The keys' scales over the tile, and the greatest of V's among the keys up to each. int8 only.
struct KeyScales {
  float k[kKeyTile];
  float v[kKeyTile];
  float v_largest[kKeyTile];
};

void gather_scales(const TileBlocks& tile, KeyScales* out) {
  const int n = tile.block_size;
  memset(out->v, 0, sizeof(out->v));  // a weight of 0 times a stale scale must be 0
  for (int b = tile.first_key / n; b * n < tile.last_key; ++b) {
    memcpy(out->k + b * n, tile.block[b].k_scale, sizeof(float) * n);
    const int first = tile.first_key > b * n ? tile.first_key : b * n;
    const int last = tile.last_key < (b + 1) * n ? tile.last_key : (b + 1) * n;
    memcpy(out->v + first, tile.block[b].v_scale + first - b * n, sizeof(float) * (last - first));
  }
  float largest = 0.0f;
  for (int i = 0; i < kKeyTile; ++i) {
    largest = out->v[i] > largest ? out->v[i] : largest;
    out->v_largest[i] = largest;
  }
}

// The power of two by which a row's weights are multiplied: 2^15 <= 2^result * (greatest scale of its keys) < 2^16.
int weight_exponent(const KeyScales& scales, int low, int high) {
  if (high <= 0) return 0;
  float largest = 0.0f;
  if (low <= 0) {
    largest = scales.v_largest[high - 1];
  } else {
    for (int i = low; i < high; ++i) largest = scales.v[i] > largest ? scales.v[i] : largest;
  }
  const int exponent = static_cast<int>(float_bits(largest) >> 23) - 127;
  return exponent < -45 ? 60 : 15 - exponent;
}

template <KvDtype T>
CASTLINE_INLINE Vec load_scores(const uint8_t* scores, int group, const KeyScales& scales) {
  if constexpr (T != kInt8) return load(reinterpret_cast<const float*>(scores) + group * kGroup);
  const Int high = load_words(scores + group * 128), low = load_words(scores + group * 128 + 64);
  return mul(to_float(_mm512_add_epi32(shift_left<8>(high), low)), load(scales.k + group * kGroup));
}

template <KvDtype T>
CASTLINE_INLINE float* score_place(uint8_t* scores, int group) {
  return reinterpret_cast<float*>(scores + group * 64 * kSumPlanes<T>);
}

// Sixty-four integers below 2^16 as two planes of bytes.
CASTLINE_INLINE void store_planes(const Int w[4], uint8_t* out) {
  const Int a = _mm512_packus_epi32(w[0], w[1]), b = _mm512_packus_epi32(w[2], w[3]);
  const Int low_byte = _mm512_set1_epi16(0xff);
  const Int high = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
  const Int low = _mm512_packus_epi16(_mm512_and_si512(a, low_byte), _mm512_and_si512(b, low_byte));
  // Packing goes by lanes of 128 bits: four keys of w[i] are word i of their lane.
  const Int order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, high));
  _mm512_storeu_si512(out + 64, _mm512_permutexvar_epi32(order, low));
}

struct RowSoftmax {
  float max, total;
};

// Keys [low, high) of the tile are the row's; groups first .. last hold all of them that are in the tile, and are whole
// steps of P.V. Scores times *multiplier* are in units of log(2). *cap* is the soft cap in the same units, or 0.
template <KvDtype T>
RowSoftmax softmax_row(uint8_t* scores, const KeyScales& scales, int low, int high, int first, int last,
                       float multiplier, float cap, uint8_t* weights) {
  Vec largest = broadcast(kMasked);
  for (int g = first; g < last; ++g) {
    const int key = g * kGroup;
    Vec x = load_scores<T>(scores, g, scales);
    if (cap > 0.0f) x = mul(tanh(mul(x, broadcast(multiplier / cap))), broadcast(cap));
    if (key < low || key + kGroup > high) x = keep_range(x, low - key, high - key, broadcast(kMasked));
    store(score_place<T>(scores, g), x);
    largest = max(largest, x);
  }
  if (cap > 0.0f) multiplier = 1.0f;
  float row_max = reduce_max(largest) * multiplier;
  if (T == kInt8) row_max -= static_cast<float>(weight_exponent(scales, low, high < kKeyTile ? high : kKeyTile));
  const Vec shift = broadcast(row_max == kMasked ? 0.0f : -row_max), factor = broadcast(multiplier);
  constexpr int kGroups = kStep<T> / kGroup;
  Vec total = broadcast(0.0f);
  for (int g = first; g < last; g += kGroups) {
    Vec p[kGroups];
    for (int i = 0; i < kGroups; ++i) {
      p[i] = exp2_16bit(fma(load(score_place<T>(scores, g + i)), factor, shift));
      total = add(total, p[i]);
    }
    if constexpr (T == kInt8) {
      Int w[4];
      for (int i = 0; i < 4; ++i) w[i] = _mm512_cvtps_epi32(mul(p[i], load(scales.v + (g + i) * kGroup)));
      store_planes(w, weights + g / 4 * 128);
    } else {
      store_bf16<T>(p, weights + g / 2 * kPlanes<T> * kTileBytes, kTileBytes);
    }
  }
  return {row_max, reduce_add(total)};
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
