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
//   round, exp2_int               nearest integer as a float; 2^x of an integral x in the normal range
//   load_int8, load_fp8           kLanes elements as floats; fp8 comes divided by kFp8Scale
//   sub, load_half                load_half: kLanes halves as floats
//   load_first, store_first       the first n lanes (any n): the others are read as 0, and left alone
//   magnitude, max_int, reduce_max_int   |x| as its bits, whose order is that of the magnitudes; a NaN is the greatest
//   store_rounded                 nearest integers as bytes, for |x| <= 127; returns their sum
//   sum_of_squares                of count floats, in double
#pragma once

#include "numeric.h"

#define CASTLINE_INLINE inline __attribute__((always_inline))

#if defined(CASTLINE_ISA_AVX512)
#include "simd_avx512.h"
#elif defined(CASTLINE_ISA_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace castline::CASTLINE_ISA {
namespace {

// exp(x) for x <= 0, and exactly 0 below -87, so that a masked score (-infinity) weighs nothing. exp(x) = 2^n exp(r)
// with |r| <= ln(2) / 2; the polynomial's relative error is below 2e-7 (degree 6, Taylor).
CASTLINE_INLINE Vec exp_nonpositive(Vec x) {
  const Vec bounded = max(x, broadcast(-87.0f));
  const Vec n = round(mul(bounded, broadcast(1.44269504f)));
  const Vec r = fma(n, broadcast(-1.42860677e-6f), fma(n, broadcast(-0.693145752f), bounded));
  Vec p = broadcast(1.0f / 720);
  p = fma(p, r, broadcast(1.0f / 120));
  p = fma(p, r, broadcast(1.0f / 24));
  p = fma(p, r, broadcast(1.0f / 6));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p, r, broadcast(1.0f));
  p = fma(p, r, broadcast(1.0f));
  return keep_above(mul(p, exp2_int(n)), x, -87.0f, broadcast(0.0f));
}

// tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|).
CASTLINE_INLINE Vec tanh(Vec x) {
  const Vec magnitude = max(x, mul(x, broadcast(-1.0f)));
  const Vec e = exp_nonpositive(mul(magnitude, broadcast(-2.0f)));
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
