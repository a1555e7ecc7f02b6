// Scores: q.k of the query rows of an item with the keys of one block, lanes = keys. Included by kernel.h only.
//
// Every row's dot product adds up in the order of dimensions, whatever the number of rows or key vectors in the
// register tile, so the bits of a score do not depend on them.
#pragma once

#include <stddef.h>

#include "layout.h"
#include "simd.h"

namespace castline::CASTLINE_ISA {
namespace {

// Rows of the register tile that begins at row first: full tiles, then what is left.
CASTLINE_INLINE int tile_rows(int rows, int first) { return rows - first < kRowTile ? rows - first : kRowTile; }

// The queries of an item, packed for the dot product: register tile by register tile, [dim][rows of the tile].
struct Queries {
  float* packed;
  int rows, dim;
};

// Packs row *row*; the rows of a tile share cache lines and one address register.
void pack_query(const Queries& queries, int row, const float* q) {
  const int first = row / kRowTile * kRowTile, rows = tile_rows(queries.rows, first);
  float* out = queries.packed + first * queries.dim + row - first;
  for (int d = 0; d < queries.dim; ++d) out[d * rows] = q[d];
}

// Dimensions of K that one load of kLanes words or elements yields, and the bytes of that many dimensions of one key.
template <KvDtype T>
constexpr int kDimsPerLoad = T == kBf16 ? 2 : T == kInt8 ? 4 : 1;
template <KvDtype T>
constexpr int kLoadBytes = T == kFp8 ? 1 : 4;

template <KvDtype T>
CASTLINE_INLINE void load_keys(const uint8_t* p, Vec* out) {
  if constexpr (T == kFp32) {
    out[0] = load(reinterpret_cast<const float*>(p));
  } else if constexpr (T == kBf16) {
    load_bf16_pair(p, out[0], out[1]);
  } else if constexpr (T == kInt8) {
    load_int8_quad(p, out);
  } else {
    out[0] = load_fp8(p);
  }
}

// scores[r * kKeyTile + i] = q[r].k[i] for Rows rows and Vectors * kLanes keys; *keys* is where those keys' first
// dimension is, *stride* the bytes from one load's dimensions to the next's.
template <KvDtype T, int Rows, int Vectors>
void score_tile(const float* q, int dim, const uint8_t* keys, ptrdiff_t stride, float* scores) {
  constexpr int kDims = kDimsPerLoad<T>;
  Vec sum[Rows][Vectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) sum[r][v] = broadcast(0.0f);
  }
  for (int d = 0; d < dim; d += kDims, q += kDims * Rows, keys += stride) {
    Vec k[Vectors][kDims];
    for (int v = 0; v < Vectors; ++v) load_keys<T>(keys + v * kLanes * kLoadBytes<T>, k[v]);
    for (int i = 0; i < kDims; ++i) {
      for (int r = 0; r < Rows; ++r) {
        const Vec x = broadcast(q[i * Rows + r]);
        for (int v = 0; v < Vectors; ++v) sum[r][v] = fma(k[v][i], x, sum[r][v]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) store(scores + r * kKeyTile + v * kLanes, sum[r][v]);
  }
}

template <KvDtype T, int Rows>
void score_rows(const float* q, int dim, const uint8_t* tile, int block_size, float* scores) {
  const ptrdiff_t stride = block_size * kLoadBytes<T>;
  int key = 0;
  for (; key + 2 * kLanes <= block_size; key += 2 * kLanes) {
    score_tile<T, Rows, 2>(q, dim, tile + key * kLoadBytes<T>, stride, scores + key);
  }
  if (key < block_size) score_tile<T, Rows, 1>(q, dim, tile + key * kLoadBytes<T>, stride, scores + key);
}

// Scores of all rows with all keys of one block, without the keys' scales.
template <KvDtype T>
void score_block(const Queries& queries, const uint8_t* tile, int block_size, float* scores) {
  for (int first = 0; first < queries.rows; first += kRowTile) {
    const float* q = queries.packed + first * queries.dim;
    float* out = scores + first * kKeyTile;
    switch (tile_rows(queries.rows, first)) {
      case 6: if constexpr (kRowTile >= 6) score_rows<T, 6>(q, queries.dim, tile, block_size, out); break;
      case 5: if constexpr (kRowTile >= 5) score_rows<T, 5>(q, queries.dim, tile, block_size, out); break;
      case 4: score_rows<T, 4>(q, queries.dim, tile, block_size, out); break;
      case 3: score_rows<T, 3>(q, queries.dim, tile, block_size, out); break;
      case 2: score_rows<T, 2>(q, queries.dim, tile, block_size, out); break;
      default: score_rows<T, 1>(q, queries.dim, tile, block_size, out); break;
    }
  }
}

// K of one block as floats [dim][block_size], for items whose rows use it more than once.
template <KvDtype T>
void decode_keys(const uint8_t* tile, int dim, int block_size, float* out) {
  constexpr int kDims = kDimsPerLoad<T>;
  for (int d = 0; d < dim; d += kDims, out += kDims * block_size) {
    for (int key = 0; key < block_size; key += kLanes) {
      Vec k[kDims];
      load_keys<T>(tile + (d / kDims * block_size + key) * kLoadBytes<T>, k);
      for (int i = 0; i < kDims; ++i) store(out + i * block_size + key, k[i]);
    }
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
