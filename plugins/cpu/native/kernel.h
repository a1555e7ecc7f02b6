// The attention of one work item: the algorithm, once, compiled for each instruction set by the kernel_*.cpp units.
//
// For each key tile: scores of all rows, softmax within the tile, weighted sum of V; then the tile is merged into the
// running result by log-sum-exp (online softmax, Milakov and Gimelshein 2018; tiling as in FlashAttention, Dao 2022).
#pragma once

#include <math.h>

#include "append.h"
#include "attention.h"
#include "layout.h"
#include "scores.h"
#include "simd.h"
#include "values.h"
#ifdef CASTLINE_ISA_AVX512
#include "scores_vnni.h"
#endif

namespace castline::CASTLINE_ISA {
namespace {

constexpr float kMasked = -INFINITY;

// The geometry of an item: its rows are (query, head of the group), its key limits those of all its queries together.
struct Rows {
  int group, count;
  int first_position;      // of first_query
  int first_key, last_key;  // keys any row may see: [first_key, last_key)
};

Rows rows_of(const Attributes& a, const Step& s, const WorkItem& item) {
  const int group = a.num_heads / a.num_kv_heads;
  const int queries = s.cu_query_lens[item.sequence + 1] - s.cu_query_lens[item.sequence];
  const int position = s.kv_lens[item.sequence] - queries + item.first_query;
  const int low = a.window > 0 && position + 1 > a.window ? position + 1 - a.window : 0;
  const int count = item.last_query - item.first_query;
  return {group, count * group, position, low, position + count};
}

float* output_row(const Attributes& a, const Step& s, const WorkItem& item, const Rows& rows, int row) {
  const int64_t token = s.cu_query_lens[item.sequence] + item.first_query + row / rows.group;
  const int head = item.kv_head * rows.group + row % rows.group;
  return s.output + (token * a.num_heads + head) * a.head_dim;
}

// Views of an item's scratch (see scratch_floats).
struct Scratch {
  float* scores;   // [rows][kKeyTile]
  float* k_scale;  // [kKeyTile] of the tile's keys
  float* v_scale;
  float* decoded;  // [block_size][dim]
  float* q;        // [rows][dim], packed
  float* sum;      // [rows][dim] running numerator
  float* tile_sum;
  float* max;  // [rows] running maximum
  float* tile_max;
  float* total;  // [rows] running denominator
  float* tile_total;
  float* q_extra;  // [rows][2]
};

size_t scratch_floats(const Attributes& a, int rows) {
  return static_cast<size_t>(rows) * (3 * a.head_dim + kKeyTile + 6) + static_cast<size_t>(a.block_size) * a.head_dim +
         2 * kKeyTile;
}

Scratch scratch_views(const Attributes& a, int rows, float* base) {
  const ptrdiff_t matrix = static_cast<ptrdiff_t>(rows) * a.head_dim;
  Scratch s;
  s.scores = base;
  s.k_scale = s.scores + static_cast<ptrdiff_t>(rows) * kKeyTile;
  s.v_scale = s.k_scale + kKeyTile;
  s.decoded = s.v_scale + kKeyTile;
  s.q = s.decoded + a.block_size * a.head_dim;
  s.sum = s.q + matrix;
  s.tile_sum = s.sum + matrix;
  s.max = s.tile_sum + matrix;
  s.tile_max = s.max + rows;
  s.total = s.tile_max + rows;
  s.tile_total = s.total + rows;
  s.q_extra = s.tile_total + rows;
  return s;
}

// --- the dtype's dot product ----------------------------------------------------------------------------------------

#ifdef CASTLINE_ISA_AVX512
template <KvDtype T>
constexpr bool kIntegerScores = T == kInt8;
IntegerQueries integer_queries(const Attributes& a, int rows, const Scratch& s) {
  return {reinterpret_cast<int32_t*>(s.q), reinterpret_cast<IntegerRow*>(s.q_extra), rows, a.head_dim};
}
#else
template <KvDtype T>
constexpr bool kIntegerScores = false;
#endif

// Whether K or V of a block are decoded to floats once rather than by every register tile of rows.
template <KvDtype T>
bool decodes(int rows) {
  return (T == kInt8 || T == kFp8) && rows > 2 * kRowTile;
}

template <KvDtype T>
void pack_row(const Attributes& a, int rows, const Scratch& s, int row, const float* q) {
#ifdef CASTLINE_ISA_AVX512
  if constexpr (kIntegerScores<T>) return pack_query(integer_queries(a, rows, s), row, q);
#endif
  pack_query(Queries{s.q, rows, a.head_dim}, row, q);
}

template <KvDtype T>
void score_keys(const Attributes& a, int rows, const Scratch& s, const uint8_t* tile, float* scores) {
#ifdef CASTLINE_ISA_AVX512
  if constexpr (kIntegerScores<T>) return score_block(integer_queries(a, rows, s), tile, a.block_size, scores);
#endif
  const Queries queries = {s.q, rows, a.head_dim};
  if (!decodes<T>(rows)) return score_block<T>(queries, tile, a.block_size, scores);
  decode_block<T>(tile, a.head_dim, a.block_size, s.decoded);
  score_block<kFp32>(queries, reinterpret_cast<const uint8_t*>(s.decoded), a.block_size, scores);
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

// The physical blocks of the key tile that begins at position tile_start, and the keys of it that any row may see.
TileBlocks tile_blocks(const Attributes& a, const Step& s, const WorkItem& item, const Rows& rows, int tile_start) {
  TileBlocks tile;
  tile.block_size = a.block_size;
  tile.first_key = rows.first_key > tile_start ? rows.first_key - tile_start : 0;
  tile.last_key = rows.last_key < tile_start + kKeyTile ? rows.last_key - tile_start : kKeyTile;
  const int32_t* table = s.block_table + item.sequence * s.table_width + tile_start / a.block_size;
  for (int b = tile.first_key / a.block_size; b * a.block_size < tile.last_key; ++b) {
    tile.block[b] = head_block(a, s.pool, table[b], item.kv_head);
  }
  return tile;
}

// Gathers the keys' scales over the tile: what a score and a weight are multiplied by. int8 only.
void gather_scales(const Attributes& a, const TileBlocks& tile, const Scratch& s) {
  const int n = a.block_size;
  for (int b = tile.first_key / n; b * n < tile.last_key; ++b) {
    for (int i = 0; i < n; ++i) s.k_scale[b * n + i] = tile.block[b].k_scale[i] * a.scale * kLog2E;
    memcpy(s.v_scale + b * n, tile.block[b].v_scale, sizeof(float) * n);
  }
}

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
    Vec x = mul(load(scores + i), T == kInt8 ? load(s.k_scale + i) : scale);
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
    if (T == kInt8) weight = mul(weight, load(s.v_scale + i));
    if (T == kFp8) weight = mul(weight, broadcast(kFp8Scale));
    store(scores + i, weight);
  }
  s.tile_max[row] = row_max;
  s.tile_total[row] = reduce_add(total);
}

// Scores, softmax and weighted sum of V of all rows over one key tile: fills tile_max, tile_total and tile_sum.
template <KvDtype T>
void attend_tile(const Attributes& a, const TileBlocks& tile, const Rows& rows, int tile_start, const Scratch& s) {
  for (int b = tile.first_key / a.block_size; b * a.block_size < tile.last_key; ++b) {
    score_keys<T>(a, rows.count, s, tile.block[b].k, s.scores + b * a.block_size);
  }
  if (T == kInt8) gather_scales(a, tile, s);
  for (int r = 0; r < rows.count; ++r) {
    const int position = rows.first_position + r / rows.group;
    const int low = a.window > 0 ? position + 1 - a.window - tile_start : 0;
    softmax_row<T>(a, tile, low, position + 1 - tile_start, s, r);
  }
  sum_values<T>(tile, rows.count, a.head_dim, s);
}

// --- merging tiles --------------------------------------------------------------------------------------------------

// Adds a tile's softmax (its maximum, sum of weights and weighted sum of V) to a row's running one.
void merge_row(int dim, float tile_max, float tile_total, const float* tile_sum, float* max, float* total, float* sum) {
  if (tile_max == kMasked) return;
  const float new_max = tile_max > *max ? tile_max : *max;
  const float keep = exp2f(*max - new_max);
  const float take = exp2f(tile_max - new_max);
  *max = new_max;
  *total = *total * keep + tile_total * take;
  for (int d = 0; d < dim; ++d) sum[d] = sum[d] * keep + tile_sum[d] * take;
}

// A tile's softmax as an item of a split unit leaves it for merge.
void write_partial(int dim, float tile_max, float tile_total, const float* tile_sum, float* partial) {
  memcpy(partial, tile_sum, sizeof(float) * dim);
  partial[dim] = tile_max;
  partial[dim + 1] = tile_total;
}

void clear_rows(const Attributes& a, const Rows& rows, float* max, float* total, float* sum) {
  for (int r = 0; r < rows.count; ++r) max[r] = kMasked;
  memset(total, 0, sizeof(float) * rows.count);
  memset(sum, 0, sizeof(float) * rows.count * a.head_dim);
}

void write_rows(const Attributes& a, const Step& s, const WorkItem& item, const Rows& rows, const float* total,
                const float* sum) {
  for (int r = 0; r < rows.count; ++r, sum += a.head_dim) {
    float* out = output_row(a, s, item, rows, r);
    const float inverse = 1.0f / total[r];
    for (int d = 0; d < a.head_dim; ++d) out[d] = sum[d] * inverse;
  }
}

template <KvDtype T>
void attend_item(const Attributes& a, const Step& s, const WorkItem& item, float* base, float* partial) {
  const Rows rows = rows_of(a, s, item);
  const Scratch scratch = scratch_views(a, rows.count, base);
  for (int r = 0; r < rows.count; ++r) {
    pack_row<T>(a, rows.count, scratch, r, output_row(a, s, item, rows, r));
  }
  if (partial == nullptr) clear_rows(a, rows, scratch.max, scratch.total, scratch.sum);
  for (int t = item.first_tile; t < item.last_tile; ++t) {
    const int start = t * kKeyTile;
    const TileBlocks tile = tile_blocks(a, s, item, rows, start);
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

[[maybe_unused]] void attend(const Attributes& a, const Step& s, const WorkItem& item, float* scratch, float* partial) {
  switch (a.kv_dtype) {
    case kFp32: return attend_item<kFp32>(a, s, item, scratch, partial);
    case kBf16: return attend_item<kBf16>(a, s, item, scratch, partial);
    case kInt8: return attend_item<kInt8>(a, s, item, scratch, partial);
    case kFp8: return attend_item<kFp8>(a, s, item, scratch, partial);
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
