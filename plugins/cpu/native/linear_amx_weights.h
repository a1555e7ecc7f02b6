// Packed weights as second operands of bf16 tiles. Included by linear_amx.cpp only.
//
// A tile takes 32 elements of K by 16 columns; a 32-bit lane of it holds two elements of one column. Which two is free
// as long as the activations are stored in the same order (kOrder4, kOrder8), and is chosen so that unpacking moves
// nothing between lanes.
//
// Weights are computed 32 at a time in fp16 and turned into bf16 by moving bits: fp16 shifted right by 3 (rounded) is
// the bf16 of the value times 2^-112. Each column's scales are first multiplied by a power of two that brings its
// largest possible weight just under 2^15, so that neither overflow nor, within 29 binades, underflow can happen; the
// sums are multiplied by the inverse. Rounding is to fp16's 11 bits, then to bf16's 8.
#pragma once

#include "linear_amx_tiles.h"

namespace castline::CASTLINE_ISA {
namespace {

constexpr int kStep = 32;  // elements of K in a tile

// Place in a step of K of each element of an activation tile's row.
alignas(64) constexpr uint16_t kOrder4[kStep] = {0,  2,  4,  6,  1,  3,  5,  7,  8,  10, 12, 14, 9,  11, 13, 15,
                                                 16, 18, 20, 22, 17, 19, 21, 23, 24, 26, 28, 30, 25, 27, 29, 31};
alignas(64) constexpr uint16_t kOrder8[kStep] = {0,  2,  1,  3,  4,  6,  5,  7,  8,  10, 9,  11, 12, 14, 13, 15,
                                                 16, 18, 17, 19, 20, 22, 21, 23, 24, 26, 25, 27, 28, 30, 29, 31};

// Activations are stored times 2^56, which keeps products of all but absurd ones within fp32's range: sums come out
// times 2^(56 - 112) and the column's power.
constexpr float kActivationScale = 0x1p56f;
constexpr float kSumScale = 0x1p56f;

typedef __m512h Halves;

CASTLINE_INLINE Int load_line(const void* p) { return _mm512_loadu_si512(p); }
CASTLINE_INLINE Int load_half_line(const void* p) {
  return _mm512_zextsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
CASTLINE_INLINE Halves as_halves(Int v) { return _mm512_castsi512_ph(v); }
CASTLINE_INLINE Int magnitudes(Int halves) { return _mm512_and_si512(halves, _mm512_set1_epi16(0x7fff)); }

// bf16 of 32 halves, divided by 2^112. A multiplication by 2^12 that keeps the high 16 bits, rounded, is the shift; it
// repeats the sign bit, which the mask undoes.
CASTLINE_INLINE Int to_scaled_bf16(Halves w) {
  const Int shifted = _mm512_mulhrs_epi16(_mm512_castph_si512(w), _mm512_set1_epi16(0x1000));
  return _mm512_and_si512(shifted, _mm512_set1_epi16(static_cast<short>(0x8fff)));
}

// Power of two of each column, as fp16 in the lower and again in the upper half of a line, that brings *bound* under
// 2^15, within what fp16 can hold; *inverse* is what makes good for it in the sums.
CASTLINE_INLINE Int column_power(Vec bound, Vec& inverse) {
  const Vec wanted = _mm512_sub_ps(broadcast(14.0f), _mm512_getexp_ps(bound));  // of a zero bound: infinite
  const Vec power = _mm512_max_ps(_mm512_min_ps(wanted, broadcast(15.0f)), broadcast(-14.0f));
  inverse = _mm512_scalef_ps(broadcast(kSumScale), _mm512_sub_ps(broadcast(0.0f), power));
  const __m256i half = _mm512_cvtps_ph(_mm512_scalef_ps(broadcast(1.0f), power), _MM_FROUND_TO_NEAREST_INT);
  return _mm512_inserti64x4(_mm512_castsi256_si512(half), half, 1);
}

// For each of the 16 columns, both words of its lane: the half that *line* holds at the column's place.
CASTLINE_INLINE Int column_pairs(Int line, int first) {
  const Int column = _mm512_setr_epi32(0, 0x10001, 0x20002, 0x30003, 0x40004, 0x50005, 0x60006, 0x70007, 0x80008,
                                       0x90009, 0xa000a, 0xb000b, 0xc000c, 0xd000d, 0xe000e, 0xf000f);
  return _mm512_permutexvar_epi16(_mm512_add_epi16(column, _mm512_set1_epi16(static_cast<short>(first))), line);
}

CASTLINE_INLINE Vec lower_floats(Int halves) { return _mm512_cvtph_ps(_mm512_castsi512_si256(halves)); }
CASTLINE_INLINE Vec upper_floats(Int halves) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)); }

// fp16 of the numbers first .. first + 15, twice: the table that a word's lowest five bits index by its lowest nibble.
CASTLINE_INLINE Int nibble_values(int first) {
  const Int word = _mm512_set_epi32(0xf000e, 0xd000c, 0xb000a, 0x90008, 0x70006, 0x50004, 0x30002, 0x10000, 0xf000e,
                                    0xd000c, 0xb000a, 0x90008, 0x70006, 0x50004, 0x30002, 0x10000);
  const Int shifted = _mm512_add_epi16(word, _mm512_set1_epi16(static_cast<short>(first)));
  return _mm512_castph_si512(_mm512_cvtepi16_ph(shifted));
}

// The values of one line of nibbles, in the order of kOrder4.
CASTLINE_INLINE void look_up(Int line, Int table, Halves q[4]) {
  q[0] = as_halves(_mm512_permutexvar_epi16(line, table));
  q[1] = as_halves(_mm512_permutexvar_epi16(_mm512_srli_epi16(line, 4), table));
  q[2] = as_halves(_mm512_permutexvar_epi16(_mm512_srli_epi16(line, 8), table));
  q[3] = as_halves(_mm512_permutexvar_epi16(_mm512_srli_epi16(line, 12), table));
}

// Strips are fetched into the second-level cache this many strips ahead of their use.
constexpr int kStripsAhead = 4;

// One strip of a matrix, its columns' powers of two found. unpack writes the tile of one step of K.
struct Strip {
  const uint8_t* weight;
  const uint16_t* scales;
  size_t ahead_bytes, ahead_scales;
  int group;
  Int power;
  Vec inverse;
};

// A format tells the bytes of a step, the order of elements, how to bound a column, and how to unpack.
struct WeightsW4Dm {
  static constexpr int kStepBytes = kStep * kStrip / 2;
  static constexpr const uint16_t* kOrder = kOrder4;

  static CASTLINE_INLINE void bound(Strip& s, int groups) {
    Int largest = _mm512_setzero_si512();
    for (int g = 0; g < groups; ++g) largest = _mm512_max_epu16(largest, magnitudes(load_line(s.scales + 32 * g)));
    const Vec column = fma(lower_floats(largest), broadcast(15.0f), upper_floats(largest));
    s.power = column_power(column, s.inverse);
  }

  static CASTLINE_INLINE void unpack(const Strip& s, int step, uint8_t* tile) {
    const uint8_t* lines = s.weight + static_cast<size_t>(step) * kStepBytes;
    const uint16_t* scales = s.scales + 2 * kStrip * step;
    _mm_prefetch(reinterpret_cast<const char*>(scales + s.ahead_scales), _MM_HINT_T1);
    const Int scaled = _mm512_castph_si512(_mm512_mul_ph(as_halves(load_line(scales)), as_halves(s.power)));
    const Halves d = as_halves(column_pairs(scaled, 0)), m = as_halves(column_pairs(scaled, 16));
    const Int table = nibble_values(0);
    for (int i = 0; i < 4; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(lines + s.ahead_bytes + 64 * i), _MM_HINT_T1);
      Halves q[4];
      look_up(load_line(lines + 64 * i), table, q);
      for (int j = 0; j < 4; ++j) {
        _mm512_store_si512(tile + 64 * (4 * i + j), to_scaled_bf16(_mm512_fmadd_ph(q[j], d, m)));
      }
    }
  }
};

// Greatest magnitude of each column's scales, which fill half a line for each group.
CASTLINE_INLINE Vec largest_scale(const Strip& s, int groups) {
  Int largest = _mm512_setzero_si512();
  for (int g = 0; g < groups; ++g) {
    largest = _mm512_max_epu16(largest, magnitudes(load_half_line(s.scales + kStrip * g)));
  }
  return lower_floats(largest);
}

CASTLINE_INLINE Halves step_scale(const Strip& s, int step) {
  const uint16_t* scales = s.scales + kStrip * (step * kStep / s.group);
  _mm_prefetch(reinterpret_cast<const char*>(scales + s.ahead_scales), _MM_HINT_T1);
  const Halves scaled = _mm512_mul_ph(as_halves(load_half_line(scales)), as_halves(s.power));
  return as_halves(column_pairs(_mm512_castph_si512(scaled), 0));
}

struct WeightsW4 {
  static constexpr int kStepBytes = kStep * kStrip / 2;
  static constexpr const uint16_t* kOrder = kOrder4;

  static CASTLINE_INLINE void bound(Strip& s, int groups) {
    s.power = column_power(mul(largest_scale(s, groups), broadcast(8.0f)), s.inverse);
  }

  static CASTLINE_INLINE void unpack(const Strip& s, int step, uint8_t* tile) {
    const uint8_t* lines = s.weight + static_cast<size_t>(step) * kStepBytes;
    const Halves d = step_scale(s, step);
    const Int table = nibble_values(-8);
    for (int i = 0; i < 4; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(lines + s.ahead_bytes + 64 * i), _MM_HINT_T1);
      Halves q[4];
      look_up(load_line(lines + 64 * i), table, q);
      for (int j = 0; j < 4; ++j) {
        _mm512_store_si512(tile + 64 * (4 * i + j), to_scaled_bf16(_mm512_mul_ph(q[j], d)));
      }
    }
  }
};

// Bytes become fp16 as the low bits of 1024 + byte.
struct WeightsW8 {
  static constexpr int kStepBytes = kStep * kStrip;
  static constexpr const uint16_t* kOrder = kOrder8;

  static CASTLINE_INLINE void bound(Strip& s, int groups) {
    s.power = column_power(mul(largest_scale(s, groups), broadcast(128.0f)), s.inverse);
  }

  static CASTLINE_INLINE void unpack(const Strip& s, int step, uint8_t* tile) {
    const uint8_t* lines = s.weight + static_cast<size_t>(step) * kStepBytes;
    const Halves d = step_scale(s, step);
    const Int low_byte = _mm512_set1_epi16(0x00ff), thousand = _mm512_set1_epi16(0x6400);
    const Halves zero = _mm512_castsi512_ph(_mm512_set1_epi16(0x6480));  // 1024 + 128
    for (int i = 0; i < 8; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(lines + s.ahead_bytes + 64 * i), _MM_HINT_T1);
      const Int line = load_line(lines + 64 * i);
      const Int even = _mm512_ternarylogic_epi32(line, low_byte, thousand, 0xea);  // (line & low_byte) | thousand
      const Int odd = _mm512_or_si512(_mm512_srli_epi16(line, 8), thousand);
      _mm512_store_si512(tile + 128 * i, to_scaled_bf16(_mm512_mul_ph(_mm512_sub_ph(as_halves(even), zero), d)));
      _mm512_store_si512(tile + 128 * i + 64, to_scaled_bf16(_mm512_mul_ph(_mm512_sub_ph(as_halves(odd), zero), d)));
    }
  }
};

template <class Format>
CASTLINE_INLINE Strip make_strip(const LinearAttributes& a, const LinearStep& s, int strip) {
  Strip out;
  out.weight = s.weight + strip * strip_bytes(a);
  out.scales = s.scales + strip * strip_scales(a);
  out.ahead_bytes = kStripsAhead * strip_bytes(a);
  out.ahead_scales = kStripsAhead * strip_scales(a);
  out.group = a.group;
  Format::bound(out, scale_groups(a));
  return out;
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
