// Finished rows of the output, written while tiles of others multiply. Included by linear_amx.cpp only.
#pragma once

#include <string.h>

#include "linear_amx_tiles.h"
#include "linear_epilogue.h"

namespace castline::CASTLINE_ISA {
namespace {

// Two strips that are multiplied together: gate and up of one unit, or those of two units. Where a call ends with a
// single strip it is multiplied twice and finished once.
struct StripPair {
  int unit, units;
  int strip[2];
};

static inline StripPair strip_pair(const LinearAttributes& a, int unit, int last) {
  if (a.gated) return {unit, 1, {2 * unit, 2 * unit + 1}};
  const int units = last - unit > 1 ? 2 : 1;
  return {unit, units, {unit, unit + units - 1}};
}

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

// Rows whose sums wait for their epilogue. The tile unit multiplies the next rows while the vector units finish these,
// a few at each step of K. Sums::row yields the sums of one row with both strips of the pair, up to a column's scale.
template <class Sums>
class Finisher {
 public:
  Finisher(const LinearAttributes& a, const LinearStep& s)
      : s_(s), activation_(a.activation), gated_(a.gated), n_(a.n) {}

  // Finishes what still waits, then takes *tiles* row tiles from *first_row* on of *pair*, whose columns have *scale*.
  void begin(const StripPair& pair, const Vec scale[2], int64_t first_row, int64_t tiles, const Sums& sums) {
    finish();
    const int64_t left = s_.rows - first_row, column = pair.unit * kStrip, at = first_row * n_ + column;
    rows_ = left < tiles * kTileRows ? left : tiles * kTileRows;
    next_ = 0;
    sums_ = sums;
    output_ = s_.output + at;
    residual_ = s_.residual == nullptr ? nullptr : s_.residual + at;
    mask_[0] = lanes_below(static_cast<int>(n_ - column));
    mask_[1] = pair.units == 2 ? lanes_below(static_cast<int>(n_ - column - kStrip)) : __mmask16{0};
    for (int i = 0; i < 2; ++i) {
      scale_[i] = scale[i];
      bias_[i] = broadcast(0.0f);
      if (s_.bias == nullptr) continue;
      bias_[i] = gated_ ? _mm512_maskz_loadu_ps(mask_[0], s_.bias + i * n_ + column)
                        : _mm512_maskz_loadu_ps(mask_[i], s_.bias + column + i * kStrip);
    }
  }

  CASTLINE_INLINE void advance(int64_t count) {
    const int64_t last = rows_ - next_ < count ? rows_ : next_ + count;
    for (; next_ < last; ++next_) {
      Vec y[2];
      sums_.row(next_, y);
      for (int i = 0; i < 2; ++i) y[i] = fma(y[i], scale_[i], bias_[i]);
      if (activation_ != kNoActivation) y[0] = activate(activation_, y[0]);
      if (gated_) {
        y[0] = mul(y[0], y[1]);
      } else if (activation_ != kNoActivation) {
        y[1] = activate(activation_, y[1]);
      }
      write(next_ * n_, mask_[0], y[0]);
      if (!gated_) write(next_ * n_ + kStrip, mask_[1], y[1]);
    }
  }

  void finish() { advance(rows_); }

 private:
  CASTLINE_INLINE void write(int64_t at, __mmask16 mask, Vec y) {
    if (residual_ != nullptr) y = add(y, _mm512_maskz_loadu_ps(mask, residual_ + at));
    _mm512_mask_storeu_ps(output_ + at, mask, y);
  }

  const LinearStep& s_;
  Activation activation_;
  bool gated_;
  int64_t n_;
  Vec scale_[2], bias_[2];
  __mmask16 mask_[2];
  int64_t rows_ = 0, next_ = 0;
  Sums sums_ = {};
  float* output_ = nullptr;
  const float* residual_ = nullptr;
};

}  // namespace
}  // namespace castline::CASTLINE_ISA
