// The geometry of a work item, the key tiles it takes, and how their results are merged. Included by kernel.h only.
#pragma once

#include <math.h>

#include "layout.h"
#include "values.h"

namespace castline::CASTLINE_ISA {
namespace {

constexpr float kMasked = -INFINITY;
constexpr int kFewRows = 8;  // of a decode, or of a chunk of a few tokens

// The geometry of an item: its rows are (query, head of the group), its key limits those of all its queries together.
struct Rows {
  int group, count;
  int first_position;      // of first_query
  int first_key, last_key;  // keys any row may see: [first_key, last_key)

  int position(int row) const { return first_position + row / group; }
};

// Position of the first key that a row may see.
int first_key(const Attributes& a, const Rows& rows, int row) {
  const int position = rows.position(row);
  return a.window > 0 && position + 1 > a.window ? position + 1 - a.window : 0;
}

Rows rows_of(const Attributes& a, const Step& s, const WorkItem& item) {
  const int group = a.num_heads / a.num_kv_heads;
  const int queries = s.cu_query_lens[item.sequence + 1] - s.cu_query_lens[item.sequence];
  const int position = s.kv_lens[item.sequence] - queries + item.first_query;
  const int count = item.last_query - item.first_query;
  Rows rows = {group, count * group, position, 0, position + count};
  rows.first_key = first_key(a, rows, 0);
  return rows;
}

float* output_row(const Attributes& a, const Step& s, const WorkItem& item, const Rows& rows, int row) {
  const int64_t token = s.cu_query_lens[item.sequence] + item.first_query + row / rows.group;
  const int head = item.kv_head * rows.group + row % rows.group;
  return s.output + (token * a.num_heads + head) * a.head_dim;
}

// K of the i-th of the blocks that an item reads, or of its last.
const uint8_t* keys_of_item(const Attributes& a, const Step& s, const WorkItem& item, int i) {
  const Rows rows = rows_of(a, s, item);
  const int start = item.first_tile * kKeyTile, end = item.last_tile * kKeyTile;
  const int first = (rows.first_key > start ? rows.first_key : start) / a.block_size;
  const int last = ((rows.last_key < end ? rows.last_key : end) - 1) / a.block_size;
  const int block = s.block_table[item.sequence * s.table_width + (first + i < last ? first + i : last)];
  return head_block(a, s.pool, block, item.kv_head).k;
}

// The physical blocks of the key tile that begins at position tile_start, and the keys of it that any row may see.
TileBlocks tile_blocks(const Attributes& a, const Step& s, const WorkItem& item, const WorkItem* next, const Rows& rows,
                       int tile_start) {
  TileBlocks tile;
  tile.block_size = a.block_size;
  tile.first_key = rows.first_key > tile_start ? rows.first_key - tile_start : 0;
  tile.last_key = rows.last_key < tile_start + kKeyTile ? rows.last_key - tile_start : kKeyTile;
  const int32_t* table = s.block_table + item.sequence * s.table_width + tile_start / a.block_size;
  for (int b = tile.first_key / a.block_size; b * a.block_size < tile.last_key; ++b) {
    tile.block[b] = head_block(a, s.pool, table[b], item.kv_head);
  }
  const int last = (tile.last_key - 1) / a.block_size;
  const int end = (rows.last_key < item.last_tile * kKeyTile ? rows.last_key : item.last_tile * kKeyTile) - tile_start;
  const int blocks = kBytesAhead / (a.block_size * a.head_dim * element_bytes(a.kv_dtype));
  tile.ahead = blocks < 1 ? 1 : blocks < kMostAhead ? blocks : kMostAhead;
  const int left = (end - 1) / a.block_size - last;  // blocks of this item
  for (int i = 0; i < tile.ahead; ++i) {
    tile.next[i] = i < left        ? head_block(a, s.pool, table[last + 1 + i], item.kv_head).k
                   : next != nullptr ? keys_of_item(a, s, *next, i - left)
                                     : tile.block[last].k;
  }
  return tile;
}

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

}  // namespace
}  // namespace castline::CASTLINE_ISA
