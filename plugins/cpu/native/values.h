// Values: the weighted sum of V over the keys of one key tile, lanes = dimensions. Included by kernel.h only.
//
// Every output element adds up in the order of keys. Keys outside [first, last) are never read: a slot that was never
// written may hold anything.
#pragma once

#include "layout.h"
#include "simd.h"

namespace castline::CASTLINE_ISA {
namespace {

template <KvDtype T>
CASTLINE_INLINE Vec load_value(const uint8_t* row) {
  if constexpr (T == kFp32) return load(reinterpret_cast<const float*>(row));
  if constexpr (T == kInt8) return load_int8(row);
  return load_fp8(row);
}

// The running sums of Rows rows by Vectors * kLanes dimensions, held in registers over a whole key tile.
template <KvDtype T, int Rows, int Vectors>
struct Accumulator {
  Vec sum[Rows][Vectors];

  CASTLINE_INLINE void clear() {
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < Vectors; ++v) sum[r][v] = broadcast(0.0f);
    }
  }

  CASTLINE_INLINE void multiply_add(const Vec values[Vectors], const float* weight) {
    for (int r = 0; r < Rows; ++r) {
      const Vec w = broadcast(weight[r * kKeyTile]);
      for (int v = 0; v < Vectors; ++v) sum[r][v] = fma(values[v], w, sum[r][v]);
    }
  }

  // Adds the keys first .. last of one block; weight[r * kKeyTile + i] belongs to key i of the block.
  CASTLINE_INLINE void add_block(const uint8_t* tile, int head_dim, int dim, int first, int last, const float* weight) {
    Vec even[Vectors];
    if constexpr (T == kBf16) {
      Vec odd[Vectors];
      for (int key = first & ~1; key < last; key += 2) {
        for (int v = 0; v < Vectors; ++v) {
          load_bf16_pair(tile + (key / 2 * head_dim + dim + v * kLanes) * 4, even[v], odd[v]);
        }
        if (key >= first) multiply_add(even, weight + key);
        if (key + 1 < last) multiply_add(odd, weight + key + 1);
      }
    } else {
      for (int key = first; key < last; ++key) {
        for (int v = 0; v < Vectors; ++v) {
          even[v] = load_value<T>(tile + (key * head_dim + dim + v * kLanes) * (T == kFp32 ? 4 : 1));
        }
        multiply_add(even, weight + key);
      }
    }
  }
};

// The blocks of one key tile: blocks first_key / block_size .. of the tile, keys first_key .. last_key used.
struct TileBlocks {
  HeadBlock block[kKeyTile / 16];
  int block_size, first_key, last_key;
};

template <KvDtype T, int Rows, int Vectors>
void value_tile(const TileBlocks& tile, int head_dim, int dim, const float* weights, float* out) {
  Accumulator<T, Rows, Vectors> accumulator;
  accumulator.clear();
  const int n = tile.block_size;
  for (int b = tile.first_key / n; b * n < tile.last_key; ++b) {
    const int first = tile.first_key > b * n ? tile.first_key - b * n : 0;
    const int last = tile.last_key < (b + 1) * n ? tile.last_key - b * n : n;
    accumulator.add_block(tile.block[b].v, head_dim, dim, first, last, weights + b * n);
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) store(out + r * head_dim + dim + v * kLanes, accumulator.sum[r][v]);
  }
}

// out[r][0 .. head_dim] for Rows rows. Where head_dim is no multiple of kLanes, the last vector begins early and computes
// some dimensions a second time, to the same bits.
template <KvDtype T, int Rows>
void value_rows(const TileBlocks& tile, int head_dim, const float* weights, float* out) {
  constexpr int kWide = kLanes == 16 ? 4 : 2;
  int dim = 0;
  for (; dim + kWide * kLanes <= head_dim; dim += kWide * kLanes) {
    value_tile<T, Rows, kWide>(tile, head_dim, dim, weights, out);
  }
  for (; dim < head_dim; dim += kLanes) {
    value_tile<T, Rows, 1>(tile, head_dim, dim + kLanes <= head_dim ? dim : head_dim - kLanes, weights, out);
  }
}

// out[rows][head_dim] = weights[rows][keys] * V over the tile's keys.
template <KvDtype T>
void value_sums(const TileBlocks& tile, int rows, int head_dim, const float* weights, float* out) {
  int r = 0;
  for (; r + kRowTile <= rows; r += kRowTile) {
    value_rows<T, kRowTile>(tile, head_dim, weights + r * kKeyTile, out + r * head_dim);
  }
  weights += r * kKeyTile;
  out += r * head_dim;
  switch (rows - r) {
    case 5: value_rows<T, 5>(tile, head_dim, weights, out); break;
    case 4: value_rows<T, 4>(tile, head_dim, weights, out); break;
    case 3: value_rows<T, 3>(tile, head_dim, weights, out); break;
    case 2: value_rows<T, 2>(tile, head_dim, weights, out); break;
    case 1: value_rows<T, 1>(tile, head_dim, weights, out); break;
    default: break;
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
