// What the operator, the work partition and the kernels of every instruction set share: plain data, no code.
//
// Headers that a kernel unit includes define no function with external linkage: the linker keeps one copy of such a
// function, and that copy could be the one compiled for an instruction set that the host lacks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace castline {

// Codes of castline.plugins.contract.
enum KvDtype : int { kFp32 = 0, kBf16 = 1, kInt8 = 2, kFp8 = 3 };
enum QkNorm : int { kNoNorm = 0, kNormPerHead = 1, kNormFull = 2 };

// Keys are taken in tiles that begin at multiples of this position. A tile's softmax is computed on its own and tiles
// are merged in order of position, whoever computes them: so a row's bits depend on its own query and keys only, never
// on chunking, on the batch, on the number of threads or on split-K. Every block size divides it.
constexpr int kKeyTile = 256;
constexpr int kMaxHeadDim = 256;

struct Attributes {
  int layer, num_heads, num_kv_heads, head_dim, block_size;
  KvDtype kv_dtype;
  float scale, softcap, norm_eps;
  int window, rotary_dim, rope_interleaved;
  QkNorm qk_norm;
  int query_tile, kv_split;
};

// One call: shapes already checked. T tokens, B sequences, M blocks a table row.
struct Step {
  int64_t num_tokens, num_sequences, table_width, num_blocks;
  const float* qkv;
  const float* cos;
  const float* sin;
  const float* q_norm_weight;
  const float* k_norm_weight;
  uint8_t* pool;
  const int32_t* slot_mapping;
  const int32_t* cu_query_lens;
  const int32_t* kv_lens;
  const int32_t* block_table;
  float* output;  // [T, num_heads * head_dim]: holds the rotated queries between append and attend
};

// The queries first_query .. last_query (within the sequence) of one sequence, for the heads of one kv head, over the
// key tiles first_tile .. last_tile.
struct WorkItem {
  int32_t sequence, kv_head;
  int32_t first_query, last_query;
  int32_t first_tile, last_tile;
  int32_t unit;         // index of the split unit, or -1 where this item takes every tile of its queries
  float cost;           // multiply-adds, relative
};

// The kernels of one instruction set.
struct Kernels {
  Isa isa;
  int min_head_dim;
  int item_rows;  // rows (queries times heads of a group) of an item where the attributes do not say
  // Floats of scratch, aligned to 64 bytes, that attend and merge need for an item of *rows* rows.
  size_t (*scratch_floats)(const Attributes&, int rows);
  // QK-norm, RoPE and quantise-and-append of one token; leaves its queries in step.output.
  void (*append)(const Attributes&, const Step&, int64_t token);
  // Attention of one item; the first keys of *next*, if there is one, are fetched meanwhile. With partial == nullptr the
  // result goes to step.output; else the softmax of every tile goes to partial, [tile][row][head_dim + 2].
  void (*attend)(const Attributes&, const Step&, const WorkItem&, const WorkItem* next, float* scratch, float* partial);
  // Merges the tiles of a split unit (item covers all of them) into step.output.
  void (*merge)(const Attributes&, const Step&, const WorkItem&, float* scratch, const float* partial);
};

}  // namespace castline
