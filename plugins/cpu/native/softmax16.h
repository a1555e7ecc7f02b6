// Softmax of one row over one key tile, for weights of 16 bits or fewer. Included by kernel.h only.
//
// int8: a weight times V's scale becomes an unsigned integer of 16 bits, as a high and a low byte, in a unit that is a
// power of two, chosen so that the greatest weight that the row's keys could have is near 2^16 units.
//
// The maximum is taken off the scores before they are multiplied: their product with a large query's multiplier is
// coarser than the differences that count, and a rounded maximum is not the maximum.
#pragma once

#include "item.h"
#include "scales.h"

namespace castline::CASTLINE_ISA {
namespace {

constexpr int kGroup = 16;  // keys of a vector
constexpr int kPlaneWidth = 64;  // keys of one store of weights: [high, low][64]

// For exponents of normal floats.
CASTLINE_INLINE float power_of_two(int exponent) { return bits_float(static_cast<uint32_t>(exponent + 127) << 23); }

struct RowSoftmax {
  float max, total;
  float unit;  // of the weights
};

// Keys [low, high) of the tile are the row's; groups first .. last hold all of them that are in the tile. read(g) is
// the scores of group g; times *multiplier* they are in units of log(2). *cap* is the soft cap in the same units, or 0.
// place(g) is where group g's scores may be kept meanwhile, and write(g, p) takes the weights of Groups groups.
template <KvDtype T, int Groups, class Read, class Place, class Write>
CASTLINE_INLINE RowSoftmax softmax_row(const KeyScales& scales, int low, int high, int first, int last,
                                       float multiplier, float cap, Read read, Place place, Write write) {
  Vec largest[Groups], total[Groups];  // of each group of a step its own: latency
  for (int i = 0; i < Groups; ++i) {
    largest[i] = broadcast(kMasked);
    total[i] = broadcast(0.0f);
  }
  for (int g = first; g < last; g += Groups) {
    const bool whole = g * kGroup >= low && (g + Groups) * kGroup <= high;
    for (int i = 0; i < Groups; ++i) {
      const int key = (g + i) * kGroup;
      Vec x = read(g + i);
      if (T == kInt8) x = mul(x, load(scales.k + key));
      if (cap > 0.0f) x = mul(tanh(mul(x, broadcast(multiplier / cap))), broadcast(cap));
      if (!whole) x = keep_range(x, low - key, high - key, broadcast(kMasked));
      store(place(g + i), x);
      largest[i] = max(largest[i], x);
    }
  }
  if (cap > 0.0f) multiplier = 1.0f;
  for (int i = 1; i < Groups; ++i) largest[0] = max(largest[0], largest[i]);
  const float largest_score = reduce_max(largest[0]);
  const int exponent = T == kInt8 ? weight_exponent(scales, low, high, 16) : 0;
  const Vec origin = broadcast(largest_score == kMasked ? 0.0f : largest_score), factor = broadcast(multiplier);
  const Vec per_unit = broadcast(power_of_two(exponent));
  for (int g = first; g < last; g += Groups) {
    Vec p[Groups];
    for (int i = 0; i < Groups; ++i) {
      p[i] = exp2_16bit(mul(sub(load(place(g + i)), origin), factor));
      total[i] = add(total[i], p[i]);
      if (T == kInt8) p[i] = mul(p[i], mul(load(scales.v + (g + i) * kGroup), per_unit));
    }
    write(g, p);
  }
  for (int i = 1; i < Groups; ++i) total[0] = add(total[0], total[i]);
  return {largest_score * multiplier, reduce_add(total[0]), power_of_two(-exponent)};
}

// Weights of 64 keys, up to 2^16, as two planes of bytes.
CASTLINE_INLINE void store_planes(const Vec p[4], uint8_t* out) {
  Int w[4];
  for (int i = 0; i < 4; ++i) w[i] = _mm512_cvtps_epi32(p[i]);
  const Int a = _mm512_packus_epi32(w[0], w[1]), b = _mm512_packus_epi32(w[2], w[3]);
  const Int low_byte = _mm512_set1_epi16(0xff);
  const Int high = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
  const Int low = _mm512_packus_epi16(_mm512_and_si512(a, low_byte), _mm512_and_si512(b, low_byte));
  // Packing saturates, and goes by lanes of 128 bits: four keys of w[i] are word i of their lane.
  const Int order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, high));
  _mm512_storeu_si512(out + 64, _mm512_permutexvar_epi32(order, low));
}

// As the bytes of q * scale: q = result * (256 * high + low), both signed, zeros up to *padded*. *sum* is theirs.
inline __attribute__((always_inline)) float query_planes(const float* q, int head_dim, int padded, float scale,
                                                         int8_t* high, int8_t* low, int32_t* sum) {
  constexpr float kQueryMax = 127 * 256 + 127;
  Vec x[kMaxHeadDim / kLanes];
  Vec largest = broadcast(0.0f);
  for (int d = 0; d < padded; d += kLanes) {
    x[d / kLanes] = mul(_mm512_maskz_loadu_ps(lanes_below(head_dim - d), q + d), broadcast(scale));
    largest = max(largest, _mm512_abs_ps(x[d / kLanes]));
  }
  const float magnitude = reduce_max(largest);
  const bool is_zero = magnitude < 0x1p-100f;  // the inverse of a smaller one could overflow
  const Vec inverse = broadcast(is_zero ? 0.0f : kQueryMax / magnitude);
  Int total = _mm512_setzero_si512();
  for (int d = 0; d < padded; d += kLanes) {
    const Int whole = _mm512_cvtps_epi32(mul(x[d / kLanes], inverse));
    total = _mm512_add_epi32(total, whole);
    const Int upper = shift_right<8>(_mm512_add_epi32(whole, _mm512_set1_epi32(128)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + d), _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low + d), _mm512_cvtepi32_epi8(whole));
  }
  *sum = _mm512_reduce_add_epi32(total);
  return is_zero ? 1.0f : magnitude / kQueryMax;  // of a zero row any will do but 0: 0 * -infinity is NaN
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
