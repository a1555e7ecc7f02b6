// The attention of one work item: the algorithm, once, compiled for each instruction set by the kernel_*.cpp units.
//
// For each key tile: scores of all rows, softmax within the tile, weighted sum of V; then the tile is merged into the
// running result by log-sum-exp (online softmax, Milakov and Gimelshein 2018; tiling as in FlashAttention, Dao 2022).
#pragma once

#include "append.h"
#include "attention.h"
#include "item.h"
#include "scales.h"
#include "scores.h"
#include "values.h"
#ifdef CASTLINE_ISA_AVX512
#include "values_vnni.h"
#endif
#ifdef CASTLINE_FP8_HALF
#include "fp8_half.h"
#endif

namespace castline::CASTLINE_ISA {
namespace {

// Views of an item's scratch (see scratch_floats).
struct Scratch {
  float* scores;   // [rows][kKeyTile]
  KeyScales* scales;
  float* decoded;  // [block_size][dim]
  float* q;        // [rows][dim], packed
  float* sum;      // [rows][dim] running numerator
  float* tile_sum;
  float* max;  // [rows] running maximum
  float* tile_max;
  float* total;  // [rows] running denominator
  float* tile_total;
  float* q_extra;  // [rows][2]
  float* units;    // [rows] of integer weights
};

size_t scratch_floats(const Attributes& a, int rows) {
  return static_cast<size_t>(rows) * (3 * a.head_dim + kKeyTile + 7) + static_cast<size_t>(a.block_size) * a.head_dim +
         sizeof(KeyScales) / sizeof(float);
}

Scratch scratch_views(const Attributes& a, int rows, float* base) {
  const ptrdiff_t matrix = static_cast<ptrdiff_t>(rows) * a.head_dim;
  Scratch s;
  s.scores = base;
  s.decoded = s.scores + static_cast<ptrdiff_t>(rows) * kKeyTile;
  s.q = s.decoded + a.block_size * a.head_dim;
  s.sum = s.q + matrix;
  s.tile_sum = s.sum + matrix;
  s.max = s.tile_sum + matrix;
  s.tile_max = s.max + rows;
  s.total = s.tile_max + rows;
  s.tile_total = s.total + rows;
  s.q_extra = s.tile_total + rows;
  s.units = s.q_extra + 2 * rows;
  s.scales = reinterpret_cast<KeyScales*>(s.units + rows);
  return s;
}

// --- the dtype's dot product ----------------------------------------------------------------------------------------

// int8 with integer dot products: queries and weights have 16 bits.
#ifdef CASTLINE_ISA_AVX512
template <KvDtype T>
constexpr bool kIntegerDot = T == kInt8;
IntegerQueries integer_queries(const Attributes& a, int rows, const Scratch& s) {
  return {reinterpret_cast<int32_t*>(s.q), reinterpret_cast<int32_t*>(s.q_extra), rows, a.head_dim};
}
#else
template <KvDtype T>
constexpr bool kIntegerDot = false;
#endif

// Whether K or V of a block are decoded to floats once rather than by every register tile of rows.
template <KvDtype T>
bool decodes(int rows) {
  return (T == kInt8 || T == kFp8) && rows > 2 * kRowTile;
}

// fp8 with sums of halves: queries and weights are halves.
#ifdef CASTLINE_FP8_HALF
template <KvDtype T>
constexpr bool kHalfDot = T == kFp8;
HalfQueries half_queries(const Attributes& a, int rows, const Scratch& s) {
  return {reinterpret_cast<uint32_t*>(s.q), rows, a.head_dim};
}
#else
template <KvDtype T>
constexpr bool kHalfDot = false;
#endif

template <KvDtype T>
void pack_row(const Attributes& a, int rows, const Scratch& s, int row, const float* q) {
#ifdef CASTLINE_ISA_AVX512
  if constexpr (kIntegerDot<T>) {
    s.q_extra[rows + row] = pack_query(integer_queries(a, rows, s), row, q, a.scale * kLog2E);
    return;
  }
#endif
#ifdef CASTLINE_FP8_HALF
  if constexpr (kHalfDot<T>) {
    s.q_extra[rows + row] = pack_query(half_queries(a, rows, s), row, q, a.scale * kLog2E);
    return;
  }
#endif
  pack_query(Queries{s.q, rows, a.head_dim}, row, q);
}

template <KvDtype T>
void score_keys(const Attributes& a, int rows, const Scratch& s, const TileBlocks& tile, int b) {
  const uint8_t* const keys = tile.block[b].k;
  float* const scores = s.scores + b * a.block_size;
  const Queries queries = {s.q, rows, a.head_dim};
  if (!decodes<T>(rows)) return score_block<T>(queries, keys, a.block_size, tile.ahead_of_k(b), scores);
  decode_block<T>(keys, a.head_dim, a.block_size, s.decoded);
  score_block<kFp32>(queries, reinterpret_cast<const uint8_t*>(s.decoded), a.block_size, 0, scores);
}

template <KvDtype T>
void sum_values(const TileBlocks& tile, int rows, int dim, const Scratch& s) {
  memset(s.tile_sum, 0, sizeof(float) * rows * dim);
  if constexpr (T == kInt8 || T == kFp8) {
    if (decodes<T>(rows)) return add_decoded_values<T>(tile, rows, dim, s.scores, s.decoded, s.tile_sum);
  }
  add_values<T>(tile, rows, dim, s.scores, s.tile_sum);
}

// --- one tile -------------------------------------------------------------------------------------------------------

// Softmax of one row over the tile's keys [low, high), not divided by its sum: scores become weights (times V's scale).
// Scores are in units of log(2), so that a weight is a power of two.
template <KvDtype T>
void softmax_row(const Attributes& a, const TileBlocks& tile, int low, int high, const Scratch& s, int row) {
  float* scores = s.scores + row * kKeyTile;
  const int begin = tile.first_key / tile.block_size * tile.block_size;
  const int end = (tile.last_key + kLanes - 1) / kLanes * kLanes;
  const Vec scale = broadcast(a.scale * kLog2E * (T == kFp8 ? kFp8Scale : 1.0f));
  const float cap = a.softcap * kLog2E;
  Vec largest = broadcast(kMasked);
  for (int i = begin; i < end; i += kLanes) {
    Vec x = mul(load(scores + i), T == kInt8 ? load(s.scales->k + i) : scale);
    if (a.softcap > 0.0f) x = mul(tanh(mul(x, broadcast(1.0f / cap))), broadcast(cap));
    x = keep_range(x, low - i, high - i, broadcast(kMasked));
    store(scores + i, x);
    largest = max(largest, x);
  }
  const float row_max = reduce_max(largest);
  const Vec shift = broadcast(row_max == kMasked ? 0.0f : -row_max);
  Vec total = broadcast(0.0f);
  for (int i = begin; i < end; i += kLanes) {
    Vec weight = exp2(add(load(scores + i), shift));
    total = add(total, weight);
    if (T == kInt8) weight = mul(weight, load(s.scales->v + i));
    if (T == kFp8) weight = mul(weight, broadcast(kFp8Scale));
    store(scores + i, weight);
  }
  s.tile_max[row] = row_max;
  s.tile_total[row] = reduce_add(total);
}

#ifdef CASTLINE_ISA_AVX512
// As below, in integers.
void attend_integer_tile(const Attributes& a, const TileBlocks& tile, const Rows& rows, int tile_start,
                         const Scratch& s) {
  const IntegerQueries queries = integer_queries(a, rows.count, s);
  for (int b = tile.first_key / a.block_size; b * a.block_size < tile.last_key; ++b) {
    fetch_scales(tile, b);
    score_block(queries, tile.block[b].k, a.block_size, tile.ahead_of_k(b), s.scores + b * a.block_size);
  }
  gather_scales(tile, 1.0f, s.scales);
  constexpr int kGroups = kPlaneWidth / kGroup;
  // integer_values reads the weights of whole blocks.
  const int first = tile.first_key / a.block_size * a.block_size / kPlaneWidth * kGroups;
  const int last = (tile.last_key + kPlaneWidth - 1) / kPlaneWidth * kGroups;
  uint8_t* const weights = reinterpret_cast<uint8_t*>(s.scores);  // a row's weights take the place of its scores
  for (int r = 0; r < rows.count; ++r) {
    const auto place = [&](int g) { return s.scores + r * kKeyTile + g * kGroup; };
    const auto read = [&](int g) { return load(place(g)); };
    const auto write = [&](int g, const Vec* p) { store_planes(p, weights + r * kKeyTile * 4 + g / kGroups * 128); };
    const RowSoftmax x =
        softmax_row<kInt8, kGroups>(*s.scales, first_key(a, rows, r) - tile_start, rows.position(r) + 1 - tile_start,
                                    first, last, s.q_extra[rows.count + r], a.softcap * kLog2E, read, place, write);
    s.tile_max[r] = x.max;
    s.tile_total[r] = x.total;
    s.units[r] = x.unit;
  }
  integer_values(tile, rows.count, a.head_dim, weights, s.units, s.tile_sum);
}
#endif

#ifdef CASTLINE_FP8_HALF
// As below, in halves.
void attend_half_tile(const Attributes& a, const TileBlocks& tile, const Rows& rows, int tile_start, const Scratch& s) {
  const HalfQueries queries = half_queries(a, rows.count, s);
  for (int b = tile.first_key / a.block_size; b * a.block_size < tile.last_key; ++b) {
    score_block(queries, tile.block[b].k, a.block_size, tile.ahead_of_k(b), s.scores + b * a.block_size);
  }
  const int first = tile.first_key / kGroup, last = (tile.last_key + kGroup - 1) / kGroup;
  for (int r = 0; r < rows.count; ++r) {
    const auto place = [&](int g) { return s.scores + r * kKeyTile + g * kGroup; };
    const auto read = [&](int g) { return load(place(g)); };
    // A row's weights take the place of its scores.
    const auto write = [&](int g, const Vec* p) {
      _mm512_storeu_si512(place(g), doubled_halves(mul(p[0], broadcast(kHalfWeight))));
    };
    const RowSoftmax x =
        softmax_row<kFp8, 1>(*s.scales, first_key(a, rows, r) - tile_start, rows.position(r) + 1 - tile_start, first,
                             last, s.q_extra[rows.count + r], a.softcap * kLog2E, read, place, write);
    s.tile_max[r] = x.max;
    s.tile_total[r] = x.total;
  }
  half_values(tile, rows.count, a.head_dim, reinterpret_cast<const uint32_t*>(s.scores), s.tile_sum);
}
#endif

// Scores, softmax and weighted sum of V of all rows over one key tile: fills tile_max, tile_total and tile_sum.
template <KvDtype T>
void attend_tile(const Attributes& a, const TileBlocks& tile, const Rows& rows, int tile_start, const Scratch& s) {
#ifdef CASTLINE_ISA_AVX512
  if constexpr (kIntegerDot<T>) return attend_integer_tile(a, tile, rows, tile_start, s);
#endif
#ifdef CASTLINE_FP8_HALF
  if constexpr (kHalfDot<T>) return attend_half_tile(a, tile, rows, tile_start, s);
#endif
  for (int b = tile.first_key / a.block_size; b * a.block_size < tile.last_key; ++b) {
    score_keys<T>(a, rows.count, s, tile, b);
  }
  if (T == kInt8) gather_scales(tile, a.scale * kLog2E, s.scales);
  for (int r = 0; r < rows.count; ++r) {
    softmax_row<T>(a, tile, first_key(a, rows, r) - tile_start, rows.position(r) + 1 - tile_start, s, r);
  }
  sum_values<T>(tile, rows.count, a.head_dim, s);
}

// --- one item -------------------------------------------------------------------------------------------------------

template <KvDtype T>
void attend_item(const Attributes& a, const Step& s, const WorkItem& item, const WorkItem* next, float* base,
                 float* partial) {
  const Rows rows = rows_of(a, s, item);
  const Scratch scratch = scratch_views(a, rows.count, base);
  for (int r = 0; r < rows.count; ++r) {
    pack_row<T>(a, rows.count, scratch, r, output_row(a, s, item, rows, r));
  }
  if (partial == nullptr) clear_rows(a, rows, scratch.max, scratch.total, scratch.sum);
  for (int t = item.first_tile; t < item.last_tile; ++t) {
    const int start = t * kKeyTile;
    const TileBlocks tile = tile_blocks(a, s, item, next, rows, start);
    attend_tile<T>(a, tile, rows, start, scratch);
    for (int r = 0; r < rows.count; ++r) {
      const float* sum = scratch.tile_sum + r * a.head_dim;
      if (partial == nullptr) {
        merge_row(a.head_dim, scratch.tile_max[r], scratch.tile_total[r], sum, scratch.max + r, scratch.total + r,
                  scratch.sum + r * a.head_dim);
      } else {
        write_partial(a.head_dim, scratch.tile_max[r], scratch.tile_total[r], sum, partial);
        partial += a.head_dim + 2;
      }
    }
  }
  if (partial == nullptr) write_rows(a, s, item, rows, scratch.total, scratch.sum);
}

[[maybe_unused]] void attend(const Attributes& a, const Step& s, const WorkItem& item, const WorkItem* next,
                             float* scratch, float* partial) {
  switch (a.kv_dtype) {
    case kFp32: return attend_item<kFp32>(a, s, item, next, scratch, partial);
    case kBf16: return attend_item<kBf16>(a, s, item, next, scratch, partial);
    case kInt8: return attend_item<kInt8>(a, s, item, next, scratch, partial);
    case kFp8: return attend_item<kFp8>(a, s, item, next, scratch, partial);
  }
}

void merge(const Attributes& a, const Step& s, const WorkItem& item, float* base, const float* partial) {
  const Rows rows = rows_of(a, s, item);
  const Scratch scratch = scratch_views(a, rows.count, base);
  clear_rows(a, rows, scratch.max, scratch.total, scratch.sum);
  for (int t = item.first_tile; t < item.last_tile; ++t) {
    for (int r = 0; r < rows.count; ++r, partial += a.head_dim + 2) {
      merge_row(a.head_dim, partial[a.head_dim], partial[a.head_dim + 1], partial, scratch.max + r, scratch.total + r,
                scratch.sum + r * a.head_dim);
    }
  }
  write_rows(a, s, item, rows, scratch.total, scratch.sum);
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
