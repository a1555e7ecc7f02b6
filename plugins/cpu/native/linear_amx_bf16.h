// Wide kernels of the formats whose scales change along K: bf16 activations by weights unpacked to bf16. Included by
// linear_amx.cpp only.
//
// A pair of strips is unpacked once into a panel, while the first pair of row tiles is multiplied: the tile unit works
// on one step as the vector units unpack the next. The other row tiles take the panel from the cache.
#pragma once

#include "linear_amx_finish.h"
#include "linear_amx_weights.h"

namespace castline::CASTLINE_ISA {
namespace {

constexpr int kPanelSteps = 64;
constexpr int kBlockTiles = 32;

static inline int64_t steps_of(const LinearAttributes& a) { return padded_k(a) / kStep; }

static inline size_t prepared_bytes_bf16(const LinearAttributes& a, int64_t rows) {
  return static_cast<size_t>(row_tiles(rows) * steps_of(a)) * kTileBytes;
}

// Activations: [row tile][step of K][row][32 elements in the format's order].
template <class Format>
void prepare_bf16(const LinearAttributes& a, const LinearStep& s, int64_t first, int64_t last, uint8_t* prepared) {
  const int64_t steps = steps_of(a);
  const Int order = load_line(Format::kOrder);
  for (int64_t row = first; row < last; ++row) {
    const RowSource source(a, s, row, kActivationScale);
    uint8_t* out = prepared + row / kTileRows * steps * kTileBytes + row % kTileRows * kTileStride;
    for (int64_t step = 0; step < steps; ++step, out += kTileBytes) {
      const int k = static_cast<int>(step) * kStep;
      const __m512bh pair = _mm512_cvtne2ps_pbh(source.values(k + kLanes), source.values(k));
      _mm512_store_si512(out, _mm512_permutexvar_epi16(order, (Int)pair));
    }
  }
  if (last == s.rows) zero_padding(prepared, s.rows, steps * kTileBytes);
}

template <class Format, bool Unpack, int RowTiles>
CASTLINE_INLINE void multiply_steps(const Strip strips[2], int64_t first_step, int64_t steps, const uint8_t* rows,
                                    int64_t tile_bytes, uint8_t* panel) {
  for (int64_t i = 0; i < steps; ++i, rows += kTileBytes, panel += 2 * kTileBytes) {
    if (Unpack) {
      Format::unpack(strips[0], static_cast<int>(first_step + i), panel);
      Format::unpack(strips[1], static_cast<int>(first_step + i), panel + kTileBytes);
    }
    load_tile<4>(rows);
    load_tile<6>(panel);
    add_product_bf16<0, 4, 6>();
    load_tile<7>(panel + kTileBytes);
    add_product_bf16<1, 4, 7>();
    if (RowTiles == 2) {
      load_tile<5>(rows + tile_bytes);
      add_product_bf16<2, 5, 6>();
      add_product_bf16<3, 5, 7>();
    }
  }
}

// Sums of one or two row tiles with both strips over the panel's steps, continuing those in *sums* or from zero.
template <class Format, bool Unpack, int RowTiles>
void multiply_tiles(const Strip strips[2], int64_t first_step, int64_t steps, const uint8_t* rows, int64_t tile_bytes,
                    uint8_t* panel, float* sums) {
  if (first_step == 0) {
    zero_tile<0>();
    zero_tile<1>();
    if (RowTiles == 2) zero_tile<2>();
    if (RowTiles == 2) zero_tile<3>();
  } else {
    load_tile<0>(sums);
    load_tile<1>(sums + kTileFloats);
    if (RowTiles == 2) load_tile<2>(sums + 2 * kTileFloats);
    if (RowTiles == 2) load_tile<3>(sums + 3 * kTileFloats);
  }
  multiply_steps<Format, Unpack, RowTiles>(strips, first_step, steps, rows, tile_bytes, panel);
  store_tile<0>(sums);
  store_tile<1>(sums + kTileFloats);
  if (RowTiles == 2) store_tile<2>(sums + 2 * kTileFloats);
  if (RowTiles == 2) store_tile<3>(sums + 3 * kTileFloats);
}

template <class Format>
void compute_bf16(const LinearAttributes& a, const LinearStep& s, int first, int last, const uint8_t* prepared) {
  alignas(64) uint8_t panel[2 * kPanelSteps * kTileBytes];
  alignas(64) float sums[2 * kBlockTiles * kTileFloats];  // [row tile][strip of the pair][row][column]
  const int64_t steps = steps_of(a), tile_bytes = steps * kTileBytes, tiles = row_tiles(s.rows);
  const int64_t block = block_tiles(tile_bytes);
  const TileScope scope(s.rows);
  for (int64_t first_tile = 0; first_tile < tiles; first_tile += block) {
    const int64_t count = tiles - first_tile < block ? tiles - first_tile : block;
    for (int unit = first; unit < last;) {
      const StripPair pair = strip_pair(a, unit, last);
      const Strip strips[2] = {make_strip<Format>(a, s, pair.strip[0], 2), make_strip<Format>(a, s, pair.strip[1], 2)};
      const Vec scale[2] = {strips[0].inverse, strips[1].inverse};
      for (int64_t step = 0; step < steps; step += kPanelSteps) {
        const int64_t panel_steps = steps - step < kPanelSteps ? steps - step : kPanelSteps;
        for (int64_t tile = 0; tile < count; tile += 2) {
          const bool two = tile + 1 < count;
          const uint8_t* rows = prepared + (first_tile + tile) * tile_bytes + step * kTileBytes;
          float* out = sums + (steps > kPanelSteps ? 2 * kTileFloats * tile : 0);
          const auto multiply = tile == 0 ? (two ? multiply_tiles<Format, true, 2> : multiply_tiles<Format, true, 1>)
                                          : (two ? multiply_tiles<Format, false, 2> : multiply_tiles<Format, false, 1>);
          multiply(strips, step, panel_steps, rows, tile_bytes, panel, out);
          if (step + panel_steps == steps) {
            finish_tile(a, s, pair, first_tile + tile, out, scale);
            if (two) finish_tile(a, s, pair, first_tile + tile + 1, out + 2 * kTileFloats, scale);
          }
        }
      }
      unit += pair.units;
    }
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
