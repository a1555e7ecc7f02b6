// The epilogue of a linear kernel: bias, activation, residual and the store of one row's 16 columns. Included by kernel
// units, after simd.h.
#pragma once

#include "linear.h"
#include "simd.h"

namespace castline::CASTLINE_ISA {
namespace {

// 1 / (1 + exp(-x)), from exp(-|x|), which cannot overflow.
CASTLINE_INLINE Vec sigmoid(Vec x) {
  const Vec e = exp2(mul(max(x, sub(broadcast(0.0f), x)), broadcast(-kLog2E)));
  return div(keep_above(broadcast(1.0f), x, 0.0f, e), add(broadcast(1.0f), e));
}

// erfc(|x|) by Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7.
CASTLINE_INLINE Vec erfc_magnitude(Vec x) {
  const Vec z = max(x, sub(broadcast(0.0f), x));
  const Vec t = div(broadcast(1.0f), fma(z, broadcast(0.3275911f), broadcast(1.0f)));
  Vec p = broadcast(1.061405429f);
  p = fma(p, t, broadcast(-1.453152027f));
  p = fma(p, t, broadcast(1.421413741f));
  p = fma(p, t, broadcast(-0.284496736f));
  p = fma(p, t, broadcast(0.254829592f));
  return mul(mul(p, t), exp2(mul(mul(z, z), broadcast(-kLog2E))));
}

CASTLINE_INLINE Vec gelu(Vec x) {
  const Vec half_tail = mul(broadcast(0.5f), erfc_magnitude(mul(x, broadcast(0.70710678f))));
  return mul(x, keep_above(sub(broadcast(1.0f), half_tail), x, 0.0f, half_tail));
}

CASTLINE_INLINE Vec gelu_tanh(Vec x) {
  const Vec cubic = fma(mul(mul(x, x), x), broadcast(0.044715f), x);
  return mul(x, sigmoid(mul(cubic, broadcast(1.5957691216f))));  // (1 + tanh(u)) / 2 = sigmoid(2 u)
}

CASTLINE_INLINE Vec activate(Activation activation, Vec x) {
  switch (activation) {
    case kSilu: return mul(x, sigmoid(x));
    case kGelu: return gelu(x);
    case kGeluTanh: return gelu_tanh(x);
    case kRelu: return keep_above(x, x, 0.0f, mul(x, broadcast(0.0f)));  // the product keeps a NaN
    case kNoActivation: break;
  }
  return x;
}

// Bias, activation and residual of *row* in *unit*; *sums* holds its 16 dot products, or 16 of the gate and then 16 of
// the up-projection.
CASTLINE_INLINE void write_unit(const LinearAttributes& a, const LinearStep& s, int64_t row, int unit,
                                const float* sums) {
  const int column = unit * kStrip;
  float* out = s.output + row * a.n + column;
  const float* residual = s.residual == nullptr ? nullptr : s.residual + row * a.n + column;
  for (int i = 0; i < kStrip && column + i < a.n; i += kLanes) {
    const int left = a.n - column - i;
    Vec y = load(sums + i);
    if (s.bias != nullptr) y = add(y, load_first(s.bias + column + i, left));
    if (a.activation != kNoActivation) y = activate(a.activation, y);
    if (a.gated) {
      Vec up = load(sums + kStrip + i);
      if (s.bias != nullptr) up = add(up, load_first(s.bias + a.n + column + i, left));
      y = mul(y, up);
    }
    if (residual != nullptr) y = add(y, load_first(residual + i, left));
    store_first(out + i, left, y);
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
