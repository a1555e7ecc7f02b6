// Scores: q.k of a few query rows with the keys of one block tile, lanes = keys. Included by kernel.h only.
//
// Every row's dot products add up in the order of dimensions, whatever the number of rows or key vectors in the register
// tile, so the bits of a score do not depend on them.
#pragma once

#include "layout.h"
#include "simd.h"

namespace castline::CASTLINE_ISA {
namespace {

// The queries of an item, in the form that the dtype's dot product wants.
struct Queries {
  const float* q;  // [rows][dim]
  int dim;
};

// Dimensions of K that one load of kLanes words or elements yields.
template <KvDtype T>
constexpr int kDimsPerLoad = T == kBf16 ? 2 : T == kInt8 ? 4 : 1;

template <KvDtype T>
CASTLINE_INLINE void load_keys(const uint8_t* tile, int block_size, int d, int key, Vec* out) {
  if constexpr (T == kFp32) {
    out[0] = load(reinterpret_cast<const float*>(tile) + d * block_size + key);
  } else if constexpr (T == kBf16) {
    load_bf16_pair(tile + (d / 2 * block_size + key) * 4, out[0], out[1]);
  } else if constexpr (T == kInt8) {
    load_int8_quad(tile + (d / 4 * block_size + key) * 4, out);
  } else {
    out[0] = load_fp8(tile + d * block_size + key);
  }
}

// scores[r * kKeyTile + i] = unscaled q[r].k[i] for Rows rows and Vectors * kLanes keys.
template <KvDtype T, int Rows, int Vectors>
void score_tile(const Queries& queries, int first_row, const uint8_t* tile, int block_size, int key, float* scores) {
  constexpr int kDims = kDimsPerLoad<T>;
  Vec sum[Rows][Vectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) sum[r][v] = broadcast(0.0f);
  }
  const float* q = queries.q + first_row * queries.dim;
  for (int d = 0; d < queries.dim; d += kDims) {
    for (int v = 0; v < Vectors; ++v) {
      Vec keys[kDims];
      load_keys<T>(tile, block_size, d, key + v * kLanes, keys);
      for (int i = 0; i < kDims; ++i) {
        for (int r = 0; r < Rows; ++r) sum[r][v] = fma(keys[i], broadcast(q[r * queries.dim + d + i]), sum[r][v]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) store(scores + r * kKeyTile + v * kLanes, sum[r][v]);
  }
}

template <KvDtype T, int Rows>
void score_rows(const Queries& queries, int first_row, const HeadBlock& block, int block_size, float* scores) {
  int key = 0;
  for (; key + 2 * kLanes <= block_size; key += 2 * kLanes) {
    score_tile<T, Rows, 2>(queries, first_row, block.k, block_size, key, scores + key);
  }
  if (key < block_size) score_tile<T, Rows, 1>(queries, first_row, block.k, block_size, key, scores + key);
}

// Scores of all rows with all keys of one block, scaled by the keys' scales where the dtype has them.
template <KvDtype T>
void score_block(const Queries& queries, int rows, const HeadBlock& block, int block_size, float* scores) {
  int r = 0;
  for (; r + kRowTile <= rows; r += kRowTile) {
    score_rows<T, kRowTile>(queries, r, block, block_size, scores + r * kKeyTile);
  }
  switch (rows - r) {
    case 5: score_rows<T, 5>(queries, r, block, block_size, scores + r * kKeyTile); break;
    case 4: score_rows<T, 4>(queries, r, block, block_size, scores + r * kKeyTile); break;
    case 3: score_rows<T, 3>(queries, r, block, block_size, scores + r * kKeyTile); break;
    case 2: score_rows<T, 2>(queries, r, block, block_size, scores + r * kKeyTile); break;
    case 1: score_rows<T, 1>(queries, r, block, block_size, scores + r * kKeyTile); break;
    default: break;
  }
  if constexpr (T == kInt8) {
    for (int i = 0; i < block_size; i += kLanes) {
      const Vec scale = load(block.k_scale + i);
      for (r = 0; r < rows; ++r) {
        store(scores + r * kKeyTile + i, mul(load(scores + r * kKeyTile + i), scale));
      }
    }
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
