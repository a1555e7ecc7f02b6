// Vec for AVX-512 (F, BW, DQ, VL): sixteen lanes. Included by simd.h only.
#pragma once

#include <immintrin.h>

namespace castline::CASTLINE_ISA {
namespace {

typedef __m512 Vec;
typedef __m512i Int;
constexpr int kLanes = 16;
constexpr int kRowTile = 6;
constexpr float kFp8Scale = 256.0f;

CASTLINE_INLINE Vec broadcast(float x) { return _mm512_set1_ps(x); }
CASTLINE_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
CASTLINE_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
CASTLINE_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
CASTLINE_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
CASTLINE_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
CASTLINE_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
CASTLINE_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
CASTLINE_INLINE float reduce_add(Vec v) { return _mm512_reduce_add_ps(v); }
CASTLINE_INLINE float reduce_max(Vec v) { return _mm512_reduce_max_ps(v); }
CASTLINE_INLINE __mmask16 lanes_below(int n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1u);
}
CASTLINE_INLINE Vec keep_range(Vec x, int lo, int hi, Vec other) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>(lanes_below(hi) & ~lanes_below(lo)), other, x);
}
CASTLINE_INLINE Vec keep_above(Vec x, Vec y, float bound, Vec other) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(y, broadcast(bound), _CMP_GT_OQ), other, x);
}
CASTLINE_INLINE Int load_words(const uint8_t* p) { return _mm512_loadu_si512(p); }
template <int N>
CASTLINE_INLINE Int shift_left(Int v) {
  return _mm512_slli_epi32(v, N);
}
template <int N>
CASTLINE_INLINE Int shift_right(Int v) {
  return _mm512_srai_epi32(v, N);
}
CASTLINE_INLINE Int high_half(Int v) { return _mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))); }
CASTLINE_INLINE Vec as_float(Int v) { return _mm512_castsi512_ps(v); }
CASTLINE_INLINE Vec to_float(Int v) { return _mm512_cvtepi32_ps(v); }
CASTLINE_INLINE Vec fraction(Vec v) { return _mm512_reduce_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
CASTLINE_INLINE Vec scale_exp2(Vec p, Vec x) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, broadcast(kLeastExponent), _CMP_GT_OQ), p, x);
}
// The bits of e4m3, moved to fp16's place, are the value divided by 256 (subnormals too).
CASTLINE_INLINE void load_fp8_pair(const uint8_t* p, Vec& even, Vec& odd) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i mask = _mm256_set1_epi16(static_cast<short>(0xbf80));
  even = _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 1), mask));
  odd = _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(bytes, 1), mask));
}
// From memory: GCC would take the halves out of the register that is stored, a shuffle more.
CASTLINE_INLINE Vec float_of_stored_halves(const __m256i& halves) {
  Vec x;
  asm("vcvtph2ps %1, %0" : "=v"(x) : "m"(halves));
  return x;
}
// Thirty-two halves as two vectors.
CASTLINE_INLINE void floats_of_halves(Int halves, Vec& low, Vec& high) {
  alignas(64) __m256i stored[2];
  _mm512_store_si512(stored, halves);
  low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
  high = float_of_stored_halves(stored[1]);
}
// Two pairs that lie side by side, with half the arithmetic on bytes. A product by 128 moves a byte, and its sign once
// more, to a half's place, on either port of vectors, where a shift has but one.
CASTLINE_INLINE void load_fp8_pairs(const uint8_t* p, Vec (*x)[2]) {
  const Int bytes = load_words(p), mask = _mm512_set1_epi16(static_cast<short>(0xbf80));
  const Int even = _mm512_maddubs_epi16(_mm512_set1_epi16(0x0080), bytes);
  const Int odd = _mm512_maddubs_epi16(_mm512_set1_epi16(static_cast<short>(0x8000)), bytes);
  floats_of_halves(_mm512_and_si512(even, mask), x[0][0], x[1][0]);
  floats_of_halves(_mm512_and_si512(odd, mask), x[0][1], x[1][1]);
}

CASTLINE_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
CASTLINE_INLINE Vec load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
CASTLINE_INLINE Vec load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(lanes_below(n), p); }
CASTLINE_INLINE void store_first(float* p, int n, Vec v) { _mm512_mask_storeu_ps(p, lanes_below(n), v); }
CASTLINE_INLINE Int magnitude(Vec v) { return _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff)); }
CASTLINE_INLINE Int max_int(Int a, Int b) { return _mm512_max_epi32(a, b); }
CASTLINE_INLINE int32_t reduce_max_int(Int v) { return _mm512_reduce_max_epi32(v); }
CASTLINE_INLINE int32_t store_rounded(int8_t* p, Vec v) {
  const Int rounded = _mm512_cvtps_epi32(v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(rounded));
  return _mm512_reduce_add_epi32(rounded);
}
CASTLINE_INLINE double sum_of_squares(const float* x, int count) {
  __m512d even = _mm512_setzero_pd(), odd = _mm512_setzero_pd();
  for (int i = 0; i < count; i += 16) {
    const Vec v = load_first(x + i, count - i);
    const __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(v)), b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
    even = _mm512_fmadd_pd(a, a, even);
    odd = _mm512_fmadd_pd(b, b, odd);
  }
  return _mm512_reduce_add_pd(_mm512_add_pd(even, odd));
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
