// Wide kernels of the formats whose scales change along K: bf16 activations by weights unpacked to bf16. Included by
// linear_amx.cpp only.
//
// Two strips are unpacked into a panel while the first pair of row tiles is multiplied: the tile unit works on one step
// of K as the vector units unpack the next. The other row tiles take the panel from the first-level cache, so K is
// taken in blocks whose panel fits there; sums wait in memory from one block to the next.
#pragma once

#include "linear_amx_finish.h"
#include "linear_amx_weights.h"
#include "linear_prologue.h"

namespace castline::CASTLINE_ISA {
namespace {

constexpr int kPanelSteps = 18;

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

// One or two row tiles over one block of K.
struct TileTask {
  const uint8_t* rows;
  int64_t tile_bytes;
  int64_t first_step, steps;
  const uint8_t* panel;  // [step & panel_mask][strip]
  int64_t panel_mask;
  float* sums;  // continued where first_step > 0
};

// Sums of the tiles; work(2 i) and work(2 i + 1) are done beside step i. Half a step of tiles follows each piece of
// work, because the processor looks no further ahead than about a hundred pending vector instructions.
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
  const uint8_t* rows = t.rows;
  for (int64_t i = 0; i < t.steps; ++i, rows += kTileBytes) {
    const uint8_t* weights = t.panel + (i & t.panel_mask) * 2 * kTileBytes;
    work(2 * i);
    stream_tile<4>(rows);
    load_tile<6>(weights);
    add_product_bf16<0, 4, 6>();
    if (RowTiles == 2) stream_tile<5>(rows + t.tile_bytes);
    if (RowTiles == 2) add_product_bf16<2, 5, 6>();
    work(2 * i + 1);
    load_tile<7>(weights + kTileBytes);
    add_product_bf16<1, 4, 7>();
    if (RowTiles == 2) add_product_bf16<3, 5, 7>();
  }
  store_tile<0>(t.sums);
  store_tile<1>(t.sums + kTileFloats);
  if (RowTiles == 2) store_tile<2>(t.sums + 2 * kTileFloats);
  if (RowTiles == 2) store_tile<3>(t.sums + 3 * kTileFloats);
}

// One block of K of one pair of strips, and where it is unpacked.
template <class Format>
struct Panel {
  StripPair pair;
  Strip strips[2];
  int64_t first_step, steps;
  uint8_t* memory;  // [step & mask][strip]
  int64_t mask;

  // Part 2 i + j is step i of strip j.
  CASTLINE_INLINE void unpack(int64_t part) const {
    const int64_t step = part >> 1, strip = part & 1;
    Format::unpack(strips[strip], static_cast<int>(first_step + step),
                   memory + ((step & mask) * 2 + strip) * kTileBytes);
  }
};

// Walks the panels of the units first .. last: the blocks of K of a pair, then the next pair.
template <class Format>
class PanelWalk {
 public:
  PanelWalk(const LinearAttributes& a, const LinearStep& s, int first, int last, int64_t block_steps)
      : a_(a), s_(s), unit_(first), last_(last), block_steps_(block_steps) {}

  // False where no panel is left.
  bool next(Panel<Format>& panel) {
    if (unit_ == last_) return false;
    if (step_ == 0) {
      pair_ = strip_pair(a_, unit_, last_);
      for (int i = 0; i < 2; ++i) strips_[i] = make_strip<Format>(a_, s_, pair_.strip[i]);
    }
    panel.pair = pair_;
    panel.strips[0] = strips_[0];
    panel.strips[1] = strips_[1];
    panel.first_step = step_;
    panel.steps = steps_of(a_) - step_ < block_steps_ ? steps_of(a_) - step_ : block_steps_;
    step_ += panel.steps;
    if (step_ == steps_of(a_)) {
      step_ = 0;
      unit_ += pair_.units;
    }
    return true;
  }

 private:
  const LinearAttributes& a_;
  const LinearStep& s_;
  int unit_, last_;
  int64_t block_steps_, step_ = 0;
  StripPair pair_;
  Strip strips_[2];
};

// Row tiles first .. last of the prepared rows.
struct RowBlock {
  int64_t first, last, tile_bytes;
  const uint8_t* prepared;

  const uint8_t* rows(int64_t tile, int64_t step) const { return prepared + tile * tile_bytes + step * kTileBytes; }
  int64_t width(int64_t tile) const { return last - tile < 2 ? 1 : 2; }
};

// Each step of a panel is unpacked while the step before it multiplies the first row tiles; the others then multiply
// the whole panel. With no others the panel is a ring of a few steps. Finished row tiles go through their epilogue
// beside the next ones.
template <class Format>
void compute_block(const LinearAttributes& a, const LinearStep& s, int first, int last, const RowBlock& block) {
  constexpr int64_t kRingMask = 3;
  static_assert(kPanelSteps > kRingMask, "a panel's memory holds the ring");
  alignas(64) uint8_t memory[2][2 * kPanelSteps * kTileBytes];
  alignas(64) float sums[2 * kBlockTiles * kTileFloats];
  const int64_t steps = steps_of(a), tiles = block.last - block.first;
  const int64_t blocks = tiles <= 2 ? 1 : (steps + kPanelSteps - 1) / kPanelSteps;
  const int64_t mask = tiles <= 2 ? kRingMask : ~int64_t{0};
  PanelWalk<Format> walk(a, s, first, last, (steps + blocks - 1) / blocks);
  Finisher<FloatSums> finisher(a, s);
  Panel<Format> panels[2];
  panels[0].memory = memory[0];
  panels[1].memory = memory[1];
  panels[0].mask = panels[1].mask = mask;
  bool left = walk.next(panels[0]);
  for (int part = 0; left && part < 2; ++part) panels[0].unpack(part);
  for (int current = 0, buffer = 0; left; current ^= 1) {
    const Panel<Format>& panel = panels[current];
    const Panel<Format>& next = panels[current ^ 1];
    left = walk.next(panels[current ^ 1]);
    const int64_t parts = 2 * panel.steps, finished = (2 * kTileRows + parts - 1) / parts;
    const bool whole = panel.first_step + panel.steps == steps;
    for (int64_t tile = block.first; tile < block.last; tile += 2, buffer ^= 1) {
      const bool is_first = tile == block.first, is_last = tile + 2 >= block.last;
      float* const to = sums + (blocks > 1 ? tile - block.first : 2 * buffer) * 2 * kTileFloats;
      const TileTask task = {block.rows(tile, panel.first_step), block.tile_bytes, panel.first_step, panel.steps,
                             panel.memory, mask, to};
      const auto work = [&](int64_t part) {
        if (is_first && part + 2 < parts) panel.unpack(part + 2);
        if (is_last && part + 2 >= parts && left) next.unpack(part + 2 - parts);
        finisher.advance(finished);
      };
      block.width(tile) == 2 ? multiply_tiles<2>(task, work) : multiply_tiles<1>(task, work);
      if (!whole) continue;
      const Vec scale[2] = {panel.strips[0].inverse, panel.strips[1].inverse};
      finisher.finish();
      finisher.begin(panel.pair, scale, tile * kTileRows, block.width(tile), {to});
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
    compute_block<Format>(a, s, first, last, {tile, end, tile_bytes, prepared});
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
