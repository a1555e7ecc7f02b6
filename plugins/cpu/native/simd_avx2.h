// Vec for AVX2 with FMA and F16C: eight lanes. Included by simd.h only.
#pragma once

#include <immintrin.h>

namespace castline::CASTLINE_ISA {
namespace {

typedef __m256 Vec;
typedef __m256i Int;
constexpr int kLanes = 8;
constexpr int kRowTile = 4;
constexpr float kFp8Scale = 256.0f;

CASTLINE_INLINE Vec broadcast(float x) { return _mm256_set1_ps(x); }
CASTLINE_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
CASTLINE_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
CASTLINE_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
CASTLINE_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
CASTLINE_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
CASTLINE_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
CASTLINE_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
CASTLINE_INLINE float reduce_add(Vec v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
CASTLINE_INLINE float reduce_max(Vec v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
CASTLINE_INLINE Vec keep_range(Vec x, int lo, int hi, Vec other) {
  const Int lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const Int below = _mm256_cmpgt_epi32(_mm256_set1_epi32(lo), lane);
  const Int keep = _mm256_andnot_si256(below, _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane));
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(keep));
}
CASTLINE_INLINE Vec keep_above(Vec x, Vec y, float bound, Vec other) {
  return _mm256_blendv_ps(other, x, _mm256_cmp_ps(y, broadcast(bound), _CMP_GT_OQ));
}
CASTLINE_INLINE Int load_words(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
template <int N>
CASTLINE_INLINE Int shift_left(Int v) {
  return _mm256_slli_epi32(v, N);
}
template <int N>
CASTLINE_INLINE Int shift_right(Int v) {
  return _mm256_srai_epi32(v, N);
}
CASTLINE_INLINE Int high_half(Int v) { return _mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000u))); }
CASTLINE_INLINE Vec as_float(Int v) { return _mm256_castsi256_ps(v); }
CASTLINE_INLINE Vec to_float(Int v) { return _mm256_cvtepi32_ps(v); }
CASTLINE_INLINE Vec fraction(Vec v) { return _mm256_sub_ps(v, _mm256_floor_ps(v)); }
CASTLINE_INLINE Vec scale_exp2(Vec p, Vec x) {
  const Int exponent = _mm256_cvtps_epi32(_mm256_floor_ps(max(x, broadcast(kLeastExponent))));
  const Vec scaled = mul(p, as_float(shift_left<23>(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)))));
  return keep_above(scaled, x, kLeastExponent, broadcast(0.0f));
}
// The bits of e4m3, moved to fp16's place, are the value divided by 256 (subnormals too).
CASTLINE_INLINE void load_fp8_pair(const uint8_t* p, Vec& even, Vec& odd) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i mask = _mm_set1_epi16(static_cast<short>(0xbf80));
  even = _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(_mm_slli_epi16(bytes, 8), 1), mask));
  odd = _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(bytes, 1), mask));
}

CASTLINE_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
CASTLINE_INLINE Vec load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
CASTLINE_INLINE Int lanes_below(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
CASTLINE_INLINE Vec load_first(const float* p, int n) { return _mm256_maskload_ps(p, lanes_below(n)); }
CASTLINE_INLINE void store_first(float* p, int n, Vec v) { _mm256_maskstore_ps(p, lanes_below(n), v); }
CASTLINE_INLINE Int magnitude(Vec v) { return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff)); }
CASTLINE_INLINE Int max_int(Int a, Int b) { return _mm256_max_epi32(a, b); }
CASTLINE_INLINE int32_t reduce_max_int(Int v) {
  __m128i x = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
CASTLINE_INLINE int32_t store_rounded(int8_t* p, Vec v) {
  const Int rounded = _mm256_cvtps_epi32(v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
CASTLINE_INLINE double sum_of_squares(const float* x, int count) {
  __m256d even = _mm256_setzero_pd(), odd = _mm256_setzero_pd();
  for (int i = 0; i < count; i += 8) {
    const Vec v = load_first(x + i, count - i);
    const __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(v)), b = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
    even = _mm256_fmadd_pd(a, a, even);
    odd = _mm256_fmadd_pd(b, b, odd);
  }
  const __m256d sum = _mm256_add_pd(even, odd);
  const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(sum), _mm256_extractf128_pd(sum, 1));
  return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
