// The attention of one work item with matrix instructions: the algorithm of kernel.h for bf16, int8 and fp8 pools, rows
// taken in strips of 16. Included by kernel_amx.cpp only.
//
// int8: queries and weights are integers of 16 bits, and sums are exact. bf16: both have 16 bits of mantissa, fp8: both
// are bf16, and products add up in fp32 in the instruction's own order. Every item takes this path, of one row or of
// many, and a row's sums do not depend on its strip: so its bits still depend on its own query and keys alone.
#pragma once

#include "kernel.h"
#include "tile_few_rows.h"
#include "tile_products.h"

namespace castline::CASTLINE_ISA {
namespace {

// Views of an item's scratch (see tile_scratch_bytes).
struct TileScratch {
  uint8_t* queries;  // [strips] of strip_query_bytes
  uint8_t* scores[2];   // of two strips: [kStrip] rows of kScoreStride
  uint8_t* weights[2];  // [kStrip] rows of kWeightStride
  uint8_t* k_panel;
  uint8_t* v_panel;
  uint8_t* products[2];  // P.V: [kStrip][group of dimensions][plane][kGroup], 32 bits each
  KeyScales* scales;
  float* multiplier;  // [rows], of the scores
  float* tile_max;    // [rows] of the tile
  float* tile_total;
  float* units;       // [rows] of integer weights
  float* max;         // [rows] running maximum, denominator and numerator
  float* total;
  float* sum;  // [rows][head_dim]
};

// Lays the views out from *base*; returns the bytes that they take.
template <KvDtype T>
size_t tile_scratch_views(const Attributes& a, int rows, uint8_t* base, TileScratch* out) {
  size_t used = 0;
  const auto take = [&](size_t bytes) {
    uint8_t* const at = base + used;
    used += (bytes + 63) / 64 * 64;
    return at;
  };
  const int strips = (rows + kStrip - 1) / kStrip;
  out->queries = take(strips * strip_query_bytes<T>(a.head_dim));
  for (int i = 0; i < 2; ++i) {
    out->scores[i] = take(kStrip * kScoreStride<T>);
    out->weights[i] = take(kStrip * kWeightStride<T>);
    out->products[i] = take(kStrip * product_stride<T>(a.head_dim));
  }
  out->k_panel = take(k_panel_bytes<T>(a.head_dim));
  out->v_panel = take(v_panel_bytes<T>(a.head_dim));
  out->scales = reinterpret_cast<KeyScales*>(take(T == kInt8 ? sizeof(KeyScales) : 0));
  out->multiplier = reinterpret_cast<float*>(take(sizeof(float) * rows));
  out->tile_max = reinterpret_cast<float*>(take(sizeof(float) * rows));
  out->tile_total = reinterpret_cast<float*>(take(sizeof(float) * rows));
  out->units = reinterpret_cast<float*>(take(sizeof(float) * rows));
  out->max = reinterpret_cast<float*>(take(sizeof(float) * rows));
  out->total = reinterpret_cast<float*>(take(sizeof(float) * rows));
  out->sum = reinterpret_cast<float*>(take(sizeof(float) * rows * a.head_dim));
  return used;
}

// --- one strip -------------------------------------------------------------------------------------------------------

// A row's P.V as floats [head_dim], in place. *unit* is that of integer weights.
template <KvDtype T>
float* product_row(uint8_t* row, int head_dim, float unit) {
  float* out = reinterpret_cast<float*>(row);
  for (int g = 0; T == kInt8 && g * kGroup < head_dim; ++g) {
    const Int high = load_words(row + g * 128), low = load_words(row + g * 128 + 64);
    store(out + g * kGroup, mul(to_float(_mm512_add_epi32(shift_left<8>(high), low)), broadcast(unit)));
  }
  return out;
}

// The keys of one key tile that any row of a strip may see, and the steps of P.V that hold them.
struct StripKeys {
  int first_row, last_row;
  int low, high;  // low >= high: none
};

struct TileStep {
  const Attributes& a;
  const Rows& rows;
  const TileScratch& s;
  const RightOperands& right;
  int tile_start;

  int position(int row) const { return rows.position(row) - tile_start; }
  int low(int row) const { return first_key(a, rows, row) - tile_start; }
  StripKeys keys(int strip) const {
    const int first = strip * kStrip, last = first + kStrip < rows.count ? first + kStrip : rows.count;
    const int high = position(last - 1) + 1;
    return {first, last, low(first) > 0 ? low(first) : 0, high < kKeyTile ? high : kKeyTile};
  }
};

// The matrix instructions of two strips, P.V of one and then the scores of another, cut in pieces that run between the
// rows of a third one's softmax. The two kinds of instruction overlap, and the matrix unit never rests for long: after
// some hundreds of nanoseconds it sleeps and takes as long to wake.
template <KvDtype T>
class Products {
 public:
  Products(const TileStep& t, int strips, int sum_strip, int score_strip) : t_(t) {
    if (sum_strip >= 0) {
      const StripKeys keys = t.keys(sum_strip);
      groups_ = keys.low < keys.high ? (t.a.head_dim + kGroup - 1) / kGroup : 0;
      first_step_ = keys.low / kStep<T>;
      last_step_ = (keys.high + kStep<T> - 1) / kStep<T>;
      weights_ = t.s.weights[sum_strip % 2];
      products_ = t.s.products[sum_strip % 2];
    }
    if (score_strip < strips) {
      const StripKeys keys = t.keys(score_strip);
      key_group_ = keys.low / kGroup / kPieceGroups<T> * kPieceGroups<T>;
      key_groups_ = keys.low < keys.high ? (keys.high + kGroup - 1) / kGroup : 0;
      queries_ = t.s.queries + score_strip * strip_query_bytes<T>(t.a.head_dim);
      scores_ = t.s.scores[score_strip % 2];
    }
  }

  // Runs the next piece. False where none is left.
  bool next() { return pending_.set == 0 ? next<1>() : next<0>(); }

  // Runs the pieces that are left and stores the last one's sums.
  void finish() {
    while (next()) {
    }
    pending_.set == 0 ? store_sums<0>(pending_) : store_sums<1>(pending_);
  }

 private:
  template <int Set>
  bool next() {
    const PendingSums before = pending_;
    if (group_ < groups_) {
      const bool all = group_ + kPieceGroups<T> <= groups_;
      value_piece<T, Set>(weights_, t_.right, group_ * kTileBytes, all, first_step_, last_step_);
      pending_ = {products_ + group_ * kSumPlanes<T> * kTileBytes, product_stride<T>(t_.a.head_dim), all ? 2 : 1, Set};
      group_ += kPieceGroups<T>;
    } else if (key_group_ < key_groups_) {
      score_piece<T, Set>(queries_, (t_.a.head_dim + kStep<T> - 1) / kStep<T>, t_.right, key_group_);
      pending_ = {scores_ + key_group_ * kSumPlanes<T> * kTileBytes, kScoreStride<T>, 2, Set};
      key_group_ += kPieceGroups<T>;
    } else {
      return false;
    }
    store_sums<1 - Set>(before);
    return true;
  }

  const TileStep& t_;
  int group_ = 0, groups_ = 0, first_step_ = 0, last_step_ = 0;
  int key_group_ = 0, key_groups_ = 0;
  const uint8_t* weights_ = nullptr;
  const uint8_t* queries_ = nullptr;
  uint8_t* products_ = nullptr;
  uint8_t* scores_ = nullptr;
  PendingSums pending_;
};

// Softmax of one row of a strip over the groups first .. last of its keys.
template <KvDtype T>
RowSoftmax weigh_row(const TileStep& t, int row, int first, int last, uint8_t* scores, uint8_t* weights) {
  constexpr int kGroups = kStep<T> / kGroup;
  const auto place = [scores](int g) { return reinterpret_cast<float*>(scores + g * 64 * kSumPlanes<T>); };
  const auto read = [scores, place](int g) {
    if constexpr (T != kInt8) return load(place(g));
    const Int high = load_words(scores + g * 128), low = load_words(scores + g * 128 + 64);
    return to_float(_mm512_add_epi32(shift_left<8>(high), low));
  };
  const auto write = [weights](int g, const Vec* p) {
    uint8_t* out = weights + g / kGroups * kPlanes<T> * kTileBytes;
    if constexpr (T == kInt8) {
      store_planes(p, out);
    } else if constexpr (T == kFp8) {
      const Vec scaled[2] = {mul(p[0], broadcast(kFp8Weight)), mul(p[1], broadcast(kFp8Weight))};
      store_bf16<T>(scaled, out, kTileBytes);
    } else {
      store_bf16<T>(p, out, kTileBytes);
    }
  };
  return softmax_row<T, kGroups>(*t.s.scales, t.low(row), t.position(row) + 1, first, last, t.s.multiplier[row],
                                 t.a.softcap * kLog2E, read, place, write);
}

// Softmax of a strip's rows, with *beside* running between them.
template <KvDtype T>
void weigh_strip(const TileStep& t, int strip, Products<T>* beside) {
  const StripKeys keys = t.keys(strip);
  constexpr int kGroups = kStep<T> / kGroup;
  const int first = keys.low / kStep<T> * kGroups, last = (keys.high + kStep<T> - 1) / kStep<T> * kGroups;
  for (int r = keys.first_row; r < keys.last_row; ++r) {
    RowSoftmax x = {kMasked, 0.0f, 1.0f};
    if (keys.low < keys.high) {
      const int i = r - keys.first_row;
      x = weigh_row<T>(t, r, first, last, t.s.scores[strip % 2] + i * kScoreStride<T>,
                       t.s.weights[strip % 2] + i * kWeightStride<T>);
    }
    t.s.tile_max[r] = x.max;
    t.s.tile_total[r] = x.total;
    t.s.units[r] = x.unit;
    beside->next();
  }
}

// Adds the tile to the strip's rows, or writes it to *partial*, [row][head_dim + 2].
template <KvDtype T>
void merge_strip(const TileStep& t, int strip, float* partial) {
  const StripKeys keys = t.keys(strip);
  const int dim = t.a.head_dim;
  for (int r = keys.first_row; r < keys.last_row; ++r) {
    uint8_t* row = t.s.products[strip % 2] + (r - keys.first_row) * product_stride<T>(dim);
    const float* product = product_row<T>(row, dim, t.s.units[r]);
    if (partial == nullptr) {
      merge_row(dim, t.s.tile_max[r], t.s.tile_total[r], product, t.s.max + r, t.s.total + r, t.s.sum + r * dim);
    } else {
      write_partial(dim, t.s.tile_max[r], t.s.tile_total[r], product, partial + r * (dim + 2));
    }
  }
}

template <KvDtype T>
void attend_strips(const TileStep& t, float* partial) {
  const int strips = (t.rows.count + kStrip - 1) / kStrip;
  for (int i = -1; i <= strips; ++i) {
    Products<T> products(t, strips, i - 1, i + 1);
    if (i >= 0 && i < strips) weigh_strip<T>(t, i, &products);
    products.finish();
    if (i >= 1) merge_strip<T>(t, i - 1, partial);
  }
}

// As attend_strips, of one strip of fp8: an item sees keys of all its tiles.
void attend_few_rows(const TileStep& t, const TileBlocks& tile, float* partial) {
  const StripKeys keys = t.keys(0);
  const FewRows f(tile, t.a.head_dim, t.s.k_panel);
  score_few_rows(f, t.s.queries, keys.low, keys.high, t.s.scores[0]);
  begin_values(f, keys.low);  // while the last scores are on their way
  Products<kFp8> none(t, 0, -1, 0);
  weigh_strip<kFp8>(t, 0, &none);
  sum_few_rows(f, t.s.weights[0], keys.low, keys.high, t.s.products[0]);
  merge_strip<kFp8>(t, 0, partial);
}

// --- one item --------------------------------------------------------------------------------------------------------

template <KvDtype T>
void attend_with_tiles(const Attributes& a, const Step& s, const WorkItem& item, const WorkItem* next, float* base,
                       float* partial) {
  const Rows rows = rows_of(a, s, item);
  if constexpr (T == kInt8) {
    // Integer dot products of vectors give the same bits, and are faster here.
    if (rows.count <= kFewRows) return attend_item<T>(a, s, item, next, base, partial);
  }
  TileScratch scratch;
  tile_scratch_views<T>(a, rows.count, reinterpret_cast<uint8_t*>(base), &scratch);
  for (int r = 0; r < rows.count; ++r) {
    uint8_t* strip = scratch.queries + r / kStrip * strip_query_bytes<T>(a.head_dim);
    const float* q = output_row(a, s, item, rows, r);
    scratch.multiplier[r] = pack_query<T>(q, a.head_dim, a.scale * kLog2E, r % kStrip, strip);
  }
  if (partial == nullptr) clear_rows(a, rows, scratch.max, scratch.total, scratch.sum);
  const TileShapes shapes(rows.count < kStrip ? rows.count : kStrip);
  for (int t = item.first_tile; t < item.last_tile; ++t) {
    const int start = t * kKeyTile;
    const TileBlocks tile = tile_blocks(a, s, item, next, rows, start);
    RightOperands right;
    const TileStep step = {a, rows, scratch, right, start};
    if (T == kFp8 && rows.count <= kStrip) {
      attend_few_rows(step, tile, partial);
    } else {
      make_keys<T>(tile, a.head_dim, scratch.k_panel, &right);
      make_values<T>(tile, a.head_dim, scratch.v_panel, &right);
      if constexpr (T == kInt8) gather_scales(tile, 1.0f, scratch.scales);
      attend_strips<T>(step, partial);
    }
    if (partial != nullptr) partial += rows.count * (a.head_dim + 2);
  }
  if (partial == nullptr) write_rows(a, s, item, rows, scratch.total, scratch.sum);
}

template <KvDtype T>
size_t tile_scratch_floats(const Attributes& a, int rows) {
  TileScratch ignored;
  const size_t floats = (tile_scratch_views<T>(a, rows, nullptr, &ignored) + 3) / 4;
  return floats > scratch_floats(a, rows) ? floats : scratch_floats(a, rows);  // merge takes the vector kernels'
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
