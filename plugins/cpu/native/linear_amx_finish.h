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

// x / (1 + exp(-x)) with exp(-x) = 2^n 2^f, |f| <= 1/2, in half the instructions of the general activation: an epilogue
// shares the vector units with unpacking. The polynomial is the minimax one of degree 5, relative error 2e-7.
CASTLINE_INLINE Vec silu(Vec x) {
  const Vec t = max(_mm512_min_ps(mul(x, broadcast(-1.44269504f)), broadcast(126.0f)), broadcast(-126.0f));
  const Vec n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = sub(t, n);
  Vec p = fma(broadcast(1.3264727e-3f), f, broadcast(9.6715128e-3f));
  p = fma(p, f, broadcast(5.5507337e-2f));
  p = fma(p, f, broadcast(2.4022242e-1f));
  p = fma(p, f, broadcast(6.9314698e-1f));
  p = fma(p, f, broadcast(1.0f));
  return div(x, add(broadcast(1.0f), _mm512_scalef_ps(p, n)));
}

CASTLINE_INLINE Vec activate_wide(Activation activation, Vec x) {
  return activation == kSilu ? silu(x) : activate(activation, x);
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

// Writes finished rows beside the multiplication of the next ones, a few at each piece of work: the tile unit
// multiplies while the vector units finish. Sums::row yields the sums of one row with both strips of the pair, up to a
// column's scale.
template <class Sums>
class Finisher {
 public:
  Finisher(const LinearAttributes& a, const LinearStep& s)
      : s_(s), activation_(a.activation), gated_(a.gated), n_(a.n) {}

  // Takes *tiles* row tiles from *first_row* on of *pair*, whose columns have *scale*. Those before must be finished.
  void begin(const StripPair& pair, const Vec scale[2], int64_t first_row, int64_t tiles, const Sums& sums) {
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
    const int64_t end = rows_ - next_ < count ? rows_ : next_ + count;
    if (next_ == end) return;
    if (gated_) {
      write_gated(end);
    } else if (activation_ == kNoActivation) {
      write_plain(end);
    } else {
      write_activated(end);
    }
    next_ = end;
  }

  void finish() { advance(rows_); }

 private:
  // What a loop over rows keeps in registers.
  struct Columns {
    Vec scale[2], bias[2];
    __mmask16 mask[2];
    float* output;
    const float* residual;

    CASTLINE_INLINE void write(int64_t at, int strip, Vec y) const {
      if (residual != nullptr) y = add(y, _mm512_maskz_loadu_ps(mask[strip], residual + at + strip * kStrip));
      _mm512_mask_storeu_ps(output + at + strip * kStrip, mask[strip], y);
    }
  };
  CASTLINE_INLINE Columns columns() const {
    return {{scale_[0], scale_[1]}, {bias_[0], bias_[1]}, {mask_[0], mask_[1]}, output_, residual_};
  }

  CASTLINE_INLINE void write_plain(int64_t end) const {
    const Columns c = columns();
    for (int64_t row = next_, at = row * n_; row < end; ++row, at += n_) {
      Vec y[2];
      sums_.row(row, y);
      for (int i = 0; i < 2; ++i) c.write(at, i, fma(y[i], c.scale[i], c.bias[i]));
    }
  }

  CASTLINE_INLINE void write_activated(int64_t end) const {
    const Columns c = columns();
    for (int64_t row = next_, at = row * n_; row < end; ++row, at += n_) {
      Vec y[2];
      sums_.row(row, y);
      for (int i = 0; i < 2; ++i) c.write(at, i, activate_wide(activation_, fma(y[i], c.scale[i], c.bias[i])));
    }
  }

  CASTLINE_INLINE void write_gated(int64_t end) const {
    const Columns c = columns();
    for (int64_t row = next_, at = row * n_; row < end; ++row, at += n_) {
      Vec y[2];
      sums_.row(row, y);
      for (int i = 0; i < 2; ++i) y[i] = fma(y[i], c.scale[i], c.bias[i]);
      c.write(at, 0, mul(activate_wide(activation_, y[0]), y[1]));
    }
  }

  const LinearStep& s_;
  const Activation activation_;
  const bool gated_;
  const int64_t n_;
  int64_t rows_ = 0, next_ = 0;
  Sums sums_ = {};
  Vec scale_[2], bias_[2];
  __mmask16 mask_[2];
  float* output_ = nullptr;
  const float* residual_ = nullptr;
};

}  // namespace
}  // namespace castline::CASTLINE_ISA
