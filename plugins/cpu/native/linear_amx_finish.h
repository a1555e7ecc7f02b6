// The two ends of a wide kernel: rows of activations with their norm, and finished rows of the output. Included by
// linear_amx.cpp only.
#pragma once

#include <math.h>
#include <string.h>

#include "linear_amx_tiles.h"

namespace castline::CASTLINE_ISA {
namespace {

CASTLINE_INLINE Vec load_first(const float* p, int count) { return _mm512_maskz_loadu_ps(lanes_below(count), p); }

// The elements of one row after the norm, times *scale*; zero beyond k.
class RowSource {
 public:
  RowSource(const LinearAttributes& a, const LinearStep& s, int64_t row, float scale)
      : x_(s.x + row * a.k), weight_(a.norm ? s.norm_weight : nullptr), k_(a.k), factor_(broadcast(scale)) {
    if (a.norm) factor_ = broadcast(scale / sqrtf(mean_of_squares() + a.norm_eps));
  }

  CASTLINE_INLINE Vec values(int k) const {
    const Vec scaled = mul(load_first(x_ + k, k_ - k), factor_);
    return weight_ == nullptr ? scaled : mul(scaled, load_first(weight_ + k, k_ - k));
  }

 private:
  float mean_of_squares() const {
    Vec sums[2] = {broadcast(0.0f), broadcast(0.0f)};
    for (int k = 0; k < k_; k += 2 * kLanes) {
      const Vec even = load_first(x_ + k, k_ - k), odd = load_first(x_ + k + kLanes, k_ - k - kLanes);
      sums[0] = fma(even, even, sums[0]);
      sums[1] = fma(odd, odd, sums[1]);
    }
    return reduce_add(add(sums[0], sums[1])) / static_cast<float>(k_);
  }

  const float* x_;
  const float* weight_;
  int k_;
  Vec factor_;
};

// Zeroes the rows that fill up the last row tile, in each of its parts. Steps of fewer than 16 rows have tiles of as
// many rows.
static inline void zero_padding(uint8_t* prepared, int64_t rows, int64_t tile_bytes) {
  const int64_t used = rows % kTileRows;
  if (used == 0 || rows < kTileRows) return;
  uint8_t* const tile = prepared + rows / kTileRows * tile_bytes;
  for (int64_t part = 0; part < tile_bytes; part += kTileBytes) {
    memset(tile + part + used * kTileStride, 0, (kTileRows - used) * kTileStride);
  }
}

CASTLINE_INLINE Vec exp_any(Vec x) {  // x <= 0
  return exp_nonpositive(x);
}

CASTLINE_INLINE Vec activate(Activation activation, Vec x) {
  if (activation == kSilu) {
    const Vec e = exp_any(mul(max(x, mul(x, broadcast(-1.0f))), broadcast(-1.0f)));
    const Vec r = div(broadcast(1.0f), add(broadcast(1.0f), e));
    return mul(x, keep_above(r, x, 0.0f, mul(e, r)));
  }
  return x;
}

// Bias, activation, residual and store of one row tile: sums [2][16][16] of both strips of the pair, each column to be
// multiplied by its scale.
CASTLINE_INLINE void finish_tile(const LinearAttributes& a, const LinearStep& s, const StripPair& pair, int64_t tile,
                                 const float* sums, const Vec scale[2]) {
  const int64_t first = tile * kTileRows;
  const int rows = static_cast<int>(s.rows - first < kTileRows ? s.rows - first : kTileRows);
  for (int u = 0; u < pair.units; ++u) {
    const int column = (pair.unit + u) * kStrip;
    const __mmask16 mask = lanes_below(a.n - column);
    Vec bias[2] = {broadcast(0.0f), broadcast(0.0f)};
    if (s.bias != nullptr) {
      bias[0] = _mm512_maskz_loadu_ps(mask, s.bias + column);
      if (a.gated) bias[1] = _mm512_maskz_loadu_ps(mask, s.bias + a.n + column);
    }
    for (int r = 0; r < rows; ++r) {
      Vec y = fma(load(sums + u * kTileFloats + r * kStrip), scale[u], bias[0]);
      y = activate(a.activation, y);
      if (a.gated) y = mul(y, fma(load(sums + kTileFloats + r * kStrip), scale[1], bias[1]));
      const int64_t at = (first + r) * a.n + column;
      if (s.residual != nullptr) y = add(y, _mm512_maskz_loadu_ps(mask, s.residual + at));
      _mm512_mask_storeu_ps(s.output + at, mask, y);
    }
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
