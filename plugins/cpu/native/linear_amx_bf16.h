// Wide kernels of the formats whose scales change along K: bf16 activations by weights unpacked to bf16. Included by
// linear_amx.cpp only.
//
// A pair of strips is unpacked into a panel while the first pair of row tiles is multiplied: the tile unit works on one
// step of K as the vector units unpack the next. The other row tiles take the panel from the first-level cache, so K is
// taken in blocks whose panel fits there; sums wait in memory from one block to the next.
#pragma once

#include "linear_amx_finish.h"
#include "linear_amx_weights.h"
#include "linear_prologue.h"

namespace castline::CASTLINE_ISA {
namespace {

#ifndef PS
#define PS 18
#endif
constexpr int kPanelSteps = PS;
constexpr int kBlockTiles = 32;

static inline int64_t steps_of(const LinearAttributes& a) { return padded_k(a) / kStep; }

static inline size_t prepared_bytes_bf16(const LinearAttributes& a, int64_t rows) {
  return static_cast<size_t>(row_tiles(rows) * steps_of(a)) * kTileBytes;
}

// Activations: [row tile][step of K][row][32 elements in the format's order].
template <class Format>
void prepare_bf16(const LinearAttributes& a, const LinearStep& s, int64_t first, int64_t last, uint8_t* prepared) {
  static_assert(kStep == kActivationGroup, "a step is what the prologue yields at once");
  const int64_t steps = steps_of(a);
  const Int order = load_line(Format::kOrder);
  const Vec scale = broadcast(kActivationScale);
  for (int64_t row = first; row < last; ++row) {
    const float factor = row_factor(a, s, row);
    uint8_t* out = prepared + row / kTileRows * steps * kTileBytes + row % kTileRows * kTileStride;
    for (int64_t step = 0; step < steps; ++step, out += kTileBytes) {
      alignas(64) float h[kStep];
      norm_group(a, s, row, factor, static_cast<int>(step), h);
      const __m512bh rounded = _mm512_cvtne2ps_pbh(mul(load(h + kLanes), scale), mul(load(h), scale));
      _mm512_store_si512(out, _mm512_permutexvar_epi16(order, (Int)rounded));
    }
  }
  if (last == s.rows) zero_padding(prepared, s.rows, steps * kTileBytes);
}

// Sums of one or two row tiles, [row tile][strip][row][column].
struct FloatSums {
  const float* sums;

  CASTLINE_INLINE void row(int64_t row, Vec out[2]) const {
    const float* from = sums + row / kTileRows * 2 * kTileFloats + row % kTileRows * kStrip;
    out[0] = load(from);
    out[1] = load(from + kTileFloats);
  }
};

// Adds the products of *steps* steps to the tiles of sums; work(i) is done beside step i.
template <int RowTiles, class Work>
CASTLINE_INLINE void multiply_steps(int64_t steps, const uint8_t* rows, int64_t tile_bytes, const uint8_t* panel,
                                    int64_t panel_mask, Work work) {
  for (int64_t i = 0; i < steps; ++i, rows += kTileBytes) {
    const uint8_t* weights = panel + (i & panel_mask) * 2 * kTileBytes;
    stream_tile<4>(rows);
    load_tile<6>(weights);
    add_product_bf16<0, 4, 6>();
    load_tile<7>(weights + kTileBytes);
    add_product_bf16<1, 4, 7>();
    if (RowTiles == 2) {
      stream_tile<5>(rows + tile_bytes);
      add_product_bf16<2, 5, 6>();
      add_product_bf16<3, 5, 7>();
    }
    work(i);
  }
}

// One or two row tiles over one block of K.
struct TileTask {
  const uint8_t* rows;
  int64_t tile_bytes;
  int64_t first_step, steps;
  uint8_t* panel;
  int64_t panel_mask;
  float* sums;  // continued where first_step > 0
};

template <int RowTiles, class Work>
CASTLINE_INLINE void multiply_tiles(const TileTask& t, Work work) {
  if (t.first_step == 0) {
    zero_tile<0>();
    zero_tile<1>();
    if (RowTiles == 2) zero_tile<2>();
    if (RowTiles == 2) zero_tile<3>();
  } else {
    load_tile<0>(t.sums);
    load_tile<1>(t.sums + kTileFloats);
    if (RowTiles == 2) load_tile<2>(t.sums + 2 * kTileFloats);
    if (RowTiles == 2) load_tile<3>(t.sums + 3 * kTileFloats);
  }
  multiply_steps<RowTiles>(t.steps, t.rows, t.tile_bytes, t.panel, t.panel_mask, work);
  store_tile<0>(t.sums);
  store_tile<1>(t.sums + kTileFloats);
  if (RowTiles == 2) store_tile<2>(t.sums + 2 * kTileFloats);
  if (RowTiles == 2) store_tile<3>(t.sums + 3 * kTileFloats);
}

// One block of K of one pair of strips, which fills a panel.
template <class Format>
struct PanelSource {
  StripPair pair;
  Strip strips[2];
  int64_t first_step, steps;

  // The tile of strip part % 2 at step part / 2.
  CASTLINE_INLINE void unpack(int64_t part, uint8_t* to) const {
    Format::unpack(strips[part & 1], static_cast<int>(first_step + (part >> 1)), to);
  }
};

// Walks the panels of the units first .. last: the blocks of K of a pair, then the next pair.
template <class Format>
class PanelWalk {
 public:
  PanelWalk(const LinearAttributes& a, const LinearStep& s, int first, int last, int64_t block_steps)
      : a_(a), s_(s), unit_(first), last_(last), block_steps_(block_steps) {}

  // False where no panel is left.
  bool next(PanelSource<Format>& source) {
    if (unit_ == last_) return false;
    if (step_ == 0) {
      const StripPair pair = strip_pair(a_, unit_, last_);
      current_ = {pair,
                  {make_strip<Format>(a_, s_, pair.strip[0], 2), make_strip<Format>(a_, s_, pair.strip[1], 2)}, 0, 0};
    }
    current_.first_step = step_;
    current_.steps = steps_of(a_) - step_ < block_steps_ ? steps_of(a_) - step_ : block_steps_;
    step_ += current_.steps;
    if (step_ == steps_of(a_)) {
      step_ = 0;
      unit_ += current_.pair.units;
    }
    source = current_;
    return true;
  }

 private:
  const LinearAttributes& a_;
  const LinearStep& s_;
  int unit_, last_;
  int64_t block_steps_, step_ = 0;
  PanelSource<Format> current_;
};

// Row tiles first .. last of the prepared rows.
struct RowBlock {
  int64_t first, last, tile_bytes;
  const uint8_t* prepared;

  const uint8_t* rows(int64_t tile, int64_t step) const { return prepared + tile * tile_bytes + step * kTileBytes; }
  int64_t width(int64_t tile) const { return last - tile < 2 ? 1 : 2; }
};

// At most two row tiles: each step of K is unpacked while the step before it multiplies, into a ring that stays in the
// first-level cache.
template <class Format, int RowTiles>
void compute_few(const LinearAttributes& a, const LinearStep& s, int first, int last, const RowBlock& block) {
  constexpr int64_t kRingMask = 3;
  alignas(64) uint8_t ring[(kRingMask + 1) * 2 * kTileBytes];
  alignas(64) float sums[2][2 * RowTiles * kTileFloats];
  PanelWalk<Format> walk(a, s, first, last, steps_of(a));
  PanelSource<Format> source;
  Finisher<FloatSums> finisher(a, s);
  for (int buffer = 0; walk.next(source); buffer ^= 1) {
    const int64_t finished = (kTileRows * RowTiles + source.steps - 1) / source.steps;
    const auto unpack = [&](int64_t i) {
      uint8_t* const to = ring + (i & kRingMask) * 2 * kTileBytes;
      source.unpack(2 * i, to);
      source.unpack(2 * i + 1, to + kTileBytes);
    };
    unpack(0);
    const TileTask task = {block.rows(block.first, 0), block.tile_bytes, 0, source.steps, ring, kRingMask,
                           sums[buffer]};
    multiply_tiles<RowTiles>(task, [&](int64_t i) {
      if (i + 1 < source.steps) unpack(i + 1);
      finisher.advance(finished);
    });
    const Vec scale[2] = {source.strips[0].inverse, source.strips[1].inverse};
    finisher.begin(source.pair, scale, block.first * kTileRows, RowTiles, {sums[buffer]});
  }
  finisher.finish();
}

// More row tiles: a whole panel multiplies them all, while the next panel is unpacked.
template <class Format>
void compute_many(const LinearAttributes& a, const LinearStep& s, int first, int last, const RowBlock& block) {
  alignas(64) uint8_t panels[2][2 * kPanelSteps * kTileBytes];
  alignas(64) float sums[2 * kBlockTiles * kTileFloats];
  const int64_t steps = steps_of(a), blocks = (steps + kPanelSteps - 1) / kPanelSteps;
  PanelWalk<Format> walk(a, s, first, last, (steps + blocks - 1) / blocks);
  PanelSource<Format> sources[2];
  Finisher<FloatSums> finisher(a, s);
  bool left = walk.next(sources[0]);
  for (int64_t part = 0; left && part < 2 * sources[0].steps; ++part) {
    sources[0].unpack(part, panels[0] + part * kTileBytes);
  }
  for (int buffer = 0; left; buffer ^= 1) {
    const PanelSource<Format>& source = sources[buffer];
    const PanelSource<Format>& next = sources[buffer ^ 1];
    uint8_t* const next_panel = panels[buffer ^ 1];
    left = walk.next(sources[buffer ^ 1]);
    const int64_t parts = left ? 2 * next.steps : 0, moments = (block.last - block.first + 1) / 2 * source.steps;
    const int64_t finished = (2 * kTileRows + source.steps - 1) / source.steps;
    int64_t part = 0, due = 0;
    const auto work = [&](int64_t) {
      finisher.advance(finished);
      for (due += parts; due >= moments; due -= moments, ++part) next.unpack(part, next_panel + part * kTileBytes);
    };
    for (int64_t tile = block.first; tile < block.last; tile += 2) {
      float* const to = sums + (blocks > 1 ? tile - block.first : tile & 2) * 2 * kTileFloats;
      const TileTask task = {block.rows(tile, source.first_step), block.tile_bytes, source.first_step, source.steps,
                             panels[buffer], -1, to};
      block.width(tile) == 2 ? multiply_tiles<2>(task, work) : multiply_tiles<1>(task, work);
      if (source.first_step + source.steps < steps) continue;
      const Vec scale[2] = {source.strips[0].inverse, source.strips[1].inverse};
      finisher.begin(source.pair, scale, tile * kTileRows, block.width(tile), {to});
    }
  }
  finisher.finish();
}

template <class Format>
void compute_bf16(const LinearAttributes& a, const LinearStep& s, int first, int last, const uint8_t* prepared) {
  const int64_t tiles = row_tiles(s.rows), tile_bytes = steps_of(a) * kTileBytes, most = block_tiles(tile_bytes);
  const TileScope scope(s.rows);
  for (int64_t tile = 0; tile < tiles; tile += most) {
    const int64_t end = tiles - tile < most ? tiles : tile + most;
    const RowBlock block = {tile, end, tile_bytes, prepared};
    if (end - tile > 2) {
      compute_many<Format>(a, s, first, last, block);
    } else {
      (end - tile == 2 ? compute_few<Format, 2> : compute_few<Format, 1>)(a, s, first, last, block);
    }
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
