// The prologue of a linear kernel: RMSNorm of a row, group by group, and rounding to int8. Included by kernel units,
// after simd.h.
#pragma once

#include <math.h>

#include "linear.h"
#include "simd.h"

namespace castline::CASTLINE_ISA {
namespace {

// What a row is multiplied by before the norm's weights: 1 / sqrt(mean(x^2) + eps), or 1 without a norm.
CASTLINE_INLINE float row_factor(const LinearAttributes& a, const LinearStep& s, int64_t row) {
  if (!a.norm) return 1.0f;
  return static_cast<float>(1.0 / sqrt(sum_of_squares(s.x + row * a.k, a.k) / a.k + a.norm_eps));
}

// Elements kActivationGroup * group .. of a row, normed where the node has a norm, into h [kActivationGroup]; zeros in
// the padding.
CASTLINE_INLINE void norm_group(const LinearAttributes& a, const LinearStep& s, int64_t row, float factor, int group,
                                float* h) {
  const int first = group * kActivationGroup;
  const float* x = s.x + row * a.k + first;
  const float* weight = s.norm_weight + first;
  const Vec f = broadcast(factor);
  if (first + kActivationGroup <= a.k) {
    for (int i = 0; i < kActivationGroup; i += kLanes) {
      store(h + i, a.norm ? mul(mul(load(x + i), f), load(weight + i)) : load(x + i));
    }
  } else {
    for (int i = 0; i < kActivationGroup; i += kLanes) {
      const int left = a.k - first - i;
      const Vec v = load_first(x + i, left);
      store(h + i, a.norm ? mul(mul(v, f), load_first(weight + i, left)) : v);
    }
  }
}

// Scale and sum of one group's integers.
struct RoundedGroup {
  float scale;
  int32_t sum;
};

// kActivationGroup floats to signed bytes: s = max|h| / 127, q = rint(h * (127 / max|h|)). A group so small that the
// inverse overflows becomes zeros; a NaN or an infinity makes the scale one too, so that the result shows it.
CASTLINE_INLINE RoundedGroup round_group(const float* h, int8_t* q) {
  Int largest = magnitude(load(h));
  for (int i = kLanes; i < kActivationGroup; i += kLanes) largest = max_int(largest, magnitude(load(h + i)));
  const float max = bits_float(static_cast<uint32_t>(reduce_max_int(largest)));
  const Vec inverse = broadcast(max > 1e-36f && max < INFINITY ? 127.0f / max : 0.0f);
  int32_t sum = 0;
  for (int i = 0; i < kActivationGroup; i += kLanes) sum += store_rounded(q + i, mul(load(h + i), inverse));
  return {max / 127.0f, sum};
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
