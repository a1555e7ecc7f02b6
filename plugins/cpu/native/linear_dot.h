// Integer dot products of weights and activations: four of K at a time, each lane a column. Included by linear_narrow.h
// only. Each variant offers
//
//   kTileRows, kTileStrips      rows and strips of the largest register tile
//   low_codes, high_codes       lanes of 4-bit codes of a line
//   byte_codes                  lanes of 8-bit codes
//   add_dot<Format>             sum += codes . activations, whose word is broadcast
//   start<Format>, finish<Format>   a sum's beginning, given -zero_point * sum(activations); the sum as floats
//
// Sums over a group of activations are exact, so that every variant gives the same.
#pragma once

#include "linear.h"
#include "simd.h"

namespace castline::CASTLINE_ISA {
namespace {

CASTLINE_INLINE int32_t load_word(const int8_t* p) {
  int32_t word;
  memcpy(&word, p, 4);
  return word;
}

#if defined(CASTLINE_ISA_AVX512)

constexpr int kTileRows = 8;
constexpr int kTileStrips = 2;

CASTLINE_INLINE Int broadcast_word(const int8_t* p) { return _mm512_set1_epi32(load_word(p)); }
CASTLINE_INLINE Int low_codes(const uint8_t* p) { return _mm512_and_si512(load_words(p), _mm512_set1_epi8(15)); }
CASTLINE_INLINE Int high_codes(const uint8_t* p) {
  return _mm512_and_si512(_mm512_srli_epi16(load_words(p), 4), _mm512_set1_epi8(15));
}
CASTLINE_INLINE Int byte_codes(const uint8_t* p) { return load_words(p); }
// In assembly because GCC 12 copies the accumulators of the intrinsic to other registers and back, and spills them.
template <LinearFormat>
CASTLINE_INLINE void add_dot(Int& sum, Int codes, Int activations) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(activations));
}
template <LinearFormat F>
CASTLINE_INLINE Int start(int32_t offset) {
  return F == kW4Dm ? _mm512_setzero_si512() : _mm512_set1_epi32(offset);
}
template <LinearFormat>
CASTLINE_INLINE Vec finish(Int sum, int32_t) {
  return to_float(sum);
}

#elif defined(CASTLINE_ISA_AVX2)

constexpr int kTileRows = 4;
constexpr int kTileStrips = 1;

CASTLINE_INLINE Int broadcast_word(const int8_t* p) { return _mm256_set1_epi32(load_word(p)); }
CASTLINE_INLINE Int low_codes(const uint8_t* p) { return _mm256_and_si256(load_words(p), _mm256_set1_epi8(15)); }
CASTLINE_INLINE Int high_codes(const uint8_t* p) {
  return _mm256_and_si256(_mm256_srli_epi16(load_words(p), 4), _mm256_set1_epi8(15));
}

#if defined(CASTLINE_ISA_AVXVNNI)

CASTLINE_INLINE Int byte_codes(const uint8_t* p) { return load_words(p); }
template <LinearFormat>
CASTLINE_INLINE void add_dot(Int& sum, Int codes, Int activations) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(activations));
}
template <LinearFormat F>
CASTLINE_INLINE Int start(int32_t offset) {
  return F == kW4Dm ? _mm256_setzero_si256() : _mm256_set1_epi32(offset);
}
template <LinearFormat>
CASTLINE_INLINE Vec finish(Int sum, int32_t) {
  return to_float(sum);
}

#else

// vpmaddubsw adds pairs of products in 16 bits. 4-bit codes stay there for a whole group: 8 * 2 * 15 * 127 < 2^15. An
// 8-bit code is taken as a magnitude, and its sign given to the activation: 2 * 128 * 127 < 2^15.
CASTLINE_INLINE Int byte_codes(const uint8_t* p) {
  return _mm256_xor_si256(load_words(p), _mm256_set1_epi8(static_cast<char>(0x80)));
}
CASTLINE_INLINE Int add_pairs(Int pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
template <LinearFormat F>
CASTLINE_INLINE void add_dot(Int& sum, Int codes, Int activations) {
  if constexpr (F == kW8) {
    const Int pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(activations, codes));
    sum = _mm256_add_epi32(sum, add_pairs(pairs));
  } else {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, activations));
  }
}
template <LinearFormat>
CASTLINE_INLINE Int start(int32_t) {
  return _mm256_setzero_si256();
}
template <LinearFormat F>
CASTLINE_INLINE Vec finish(Int sum, int32_t offset) {
  if constexpr (F == kW8) return to_float(sum);
  const Int words = add_pairs(sum);
  return to_float(F == kW4 ? _mm256_add_epi32(words, _mm256_set1_epi32(offset)) : words);
}

#endif

#else

constexpr int kTileRows = 4;
constexpr int kTileStrips = 1;

CASTLINE_INLINE Int broadcast_word(const int8_t* p) {
  const int32_t word = load_word(p);
  return Int{word, word, word, word};
}
CASTLINE_INLINE Int low_codes(const uint8_t* p) { return load_words(p) & 0x0f0f0f0f; }
CASTLINE_INLINE Int high_codes(const uint8_t* p) { return (load_words(p) >> 4) & 0x0f0f0f0f; }
CASTLINE_INLINE Int byte_codes(const uint8_t* p) { return load_words(p); }
template <LinearFormat>
CASTLINE_INLINE void add_dot(Int& sum, Int codes, Int activations) {
  // An activation is the same in every lane: a byte of it, with its sign, is one number.
  const int32_t word = activations[0];
  sum += (codes & 255) * static_cast<int8_t>(word);
  sum += ((codes >> 8) & 255) * static_cast<int8_t>(word >> 8);
  sum += ((codes >> 16) & 255) * static_cast<int8_t>(word >> 16);
  sum += ((codes >> 24) & 255) * static_cast<int8_t>(word >> 24);
}
template <LinearFormat F>
CASTLINE_INLINE Int start(int32_t offset) {
  const int32_t first = F == kW4Dm ? 0 : offset;
  return Int{first, first, first, first};
}
template <LinearFormat>
CASTLINE_INLINE Vec finish(Int sum, int32_t) {
  return to_float(sum);
}

#endif

}  // namespace
}  // namespace castline::CASTLINE_ISA
