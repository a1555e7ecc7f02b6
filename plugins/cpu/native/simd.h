// The SIMD abstraction: chooses by CASTLINE_ISA, which the including unit defines. Each variant offers, inside
// castline::CASTLINE_ISA and with internal linkage:
//
//   Vec, Int                      kLanes floats; kLanes 32-bit integers
//   kRowTile                      rows of a register tile: kRowTile * 2 accumulators of Vec fit the registers
//   load, store, broadcast        unaligned
//   add, mul, div, fma, max       fma(a, b, c) = a * b + c, fused where the instruction set has it
//   reduce_add, reduce_max
//   keep_range(x, lo, hi, other)  lane i of x where lo <= i < hi, else of other
//   keep_above(x, y, bound, other)  lane of x where y > bound, else of other
//   load_words, shift_left<N>, shift_right<N> (arithmetic), high_half, as_float, to_float
//   fraction, scale_exp2          x - floor(x); p * 2^floor(x), and 0 where x <= kLeastExponent
//   load_fp8_pair                 even and odd ones of 2 * kLanes elements as floats divided by kFp8Scale
//   sub, load_half                load_half: kLanes halves as floats
//   load_first, store_first       the first n lanes (any n): the others are read as 0, and left alone
//   magnitude, max_int, reduce_max_int   |x| as its bits, whose order is that of the magnitudes; a NaN is the greatest
//   store_rounded                 nearest integers as bytes, for |x| <= 127; returns their sum
//   sum_of_squares                of count floats, in double
#pragma once

#include "numeric.h"

#define CASTLINE_INLINE inline __attribute__((always_inline))
// For loops over a register tile: inlined into a larger function, their accumulators would be spilled.
#define CASTLINE_LOOP __attribute__((noinline))

namespace castline {
// Weights below 2^kLeastExponent of the greatest are 0: they cannot change a sum of floats, and products of smaller
// ones would be subnormal, which takes a processor a hundred cycles.
constexpr float kLeastExponent = -64.0f;
}  // namespace castline

#if defined(CASTLINE_ISA_AVX512)
#include "simd_avx512.h"
#elif defined(CASTLINE_ISA_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace castline::CASTLINE_ISA {
namespace {

constexpr float kLog2E = 1.44269504f;

// Fetches the cache line at *p* into the first level; any address will do.
CASTLINE_INLINE void fetch(const uint8_t* p) { __builtin_prefetch(p, 0, 3); }

// 2^x, and exactly 0 of x <= kLeastExponent, so that a masked score weighs nothing. 2^x = 2^floor(x) 2^f; the
// polynomials are minimax for the relative error of 2^f on [0, 1): 1.5e-7, in float.
CASTLINE_INLINE Vec exp2(Vec x) {
  const Vec f = fraction(x);
  Vec p = broadcast(0.00187757669f);
  p = fma(p, f, broadcast(0.00898933969f));
  p = fma(p, f, broadcast(0.0558263175f));
  p = fma(p, f, broadcast(0.240153611f));
  p = fma(p, f, broadcast(0.693153083f));
  p = fma(p, f, broadcast(0.99999994f));
  return scale_exp2(p, x);
}

// As exp2, to 2.7e-6: for what is then rounded to 16 bits or fewer.
CASTLINE_INLINE Vec exp2_16bit(Vec x) {
  const Vec f = fraction(x);
  Vec p = broadcast(0.0135341678f);
  p = fma(p, f, broadcast(0.0520114601f));
  p = fma(p, f, broadcast(0.241442755f));
  p = fma(p, f, broadcast(0.693003833f));
  p = fma(p, f, broadcast(1.00000262f));
  return scale_exp2(p, x);
}

// tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|).
CASTLINE_INLINE Vec tanh(Vec x) {
  const Vec magnitude = max(x, mul(x, broadcast(-1.0f)));
  const Vec e = exp2(mul(magnitude, broadcast(-2.0f * kLog2E)));
  const Vec one = broadcast(1.0f);
  const Vec y = div(add(one, mul(e, broadcast(-1.0f))), add(one, e));
  return keep_above(y, x, 0.0f, mul(y, broadcast(-1.0f)));
}

CASTLINE_INLINE void load_bf16_pair(const uint8_t* p, Vec& even, Vec& odd) {
  const Int words = load_words(p);
  even = as_float(shift_left<16>(words));
  odd = as_float(high_half(words));
}

CASTLINE_INLINE void load_int8_quad(const uint8_t* p, Vec out[4]) {
  const Int words = load_words(p);
  out[0] = to_float(shift_right<24>(shift_left<24>(words)));
  out[1] = to_float(shift_right<24>(shift_left<16>(words)));
  out[2] = to_float(shift_right<24>(shift_left<8>(words)));
  out[3] = to_float(shift_right<24>(words));
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
