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

// Bytes of the elements that lie side by side.
template <KvDtype T>
constexpr int kLoadBytes = side_by_side(T) * element_bytes(T);

// kLanes keys (of V: dimensions) of side_by_side(T) dimensions (of V: keys) each.
template <KvDtype T>
CASTLINE_INLINE void load_beside(const uint8_t* p, Vec* out) {
  if constexpr (T == kFp32) {
    out[0] = load(reinterpret_cast<const float*>(p));
  } else if constexpr (T == kBf16) {
    load_bf16_pair(p, out[0], out[1]);
  } else if constexpr (T == kInt8) {
    load_int8_quad(p, out);
  } else {
    load_fp8_pair(p, out[0], out[1]);
  }
}

// As load_beside, of Vectors * kLanes keys.
template <KvDtype T, int Vectors>
CASTLINE_INLINE void load_vectors(const uint8_t* p, Vec (*out)[side_by_side(T)]) {
  int v = 0;
#ifdef CASTLINE_ISA_AVX512
  if constexpr (T == kFp8) {
    #pragma GCC unroll 8
    for (; v + 2 <= Vectors; v += 2) load_fp8_pairs(p + v * kLanes * kLoadBytes<T>, out + v);
  }
#endif
  #pragma GCC unroll 8
  for (; v < Vectors; ++v) load_beside<T>(p + v * kLanes * kLoadBytes<T>, out[v]);
}

// Fetches the cache lines of Bytes bytes at *p*. Bytes is a multiple of 64, or less: then p's line.
template <int Bytes>
CASTLINE_INLINE void fetch_ahead(const uint8_t* p) {
  #pragma GCC unroll 8
  for (int i = 0; i < Bytes; i += 64) fetch(p + i);
}

// scores[r * kKeyTile + i] = q[r].k[i] for Rows rows and Vectors * kLanes keys; *keys* is where those keys' first
// dimension is, *stride* the bytes from one load's dimensions to the next's.
template <KvDtype T, int Rows, int Vectors>
CASTLINE_LOOP void score_tile(const float* q, int dim, const uint8_t* keys, ptrdiff_t stride, ptrdiff_t ahead,
                              float* scores) {
  constexpr int kDims = side_by_side(T);
  Vec sum[Rows][Vectors];
  #pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    #pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) sum[r][v] = broadcast(0.0f);
  }
  for (int d = 0; d < dim; d += kDims, q += kDims * Rows, keys += stride) {
    Vec k[Vectors][kDims];
    load_vectors<T, Vectors>(keys, k);
    fetch_ahead<Vectors * kLanes * kLoadBytes<T>>(keys + ahead);
    #pragma GCC unroll 8
    for (int i = 0; i < kDims; ++i) {
      #pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const Vec x = broadcast(q[i * Rows + r]);
        #pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) sum[r][v] = fma(k[v][i], x, sum[r][v]);
      }
    }
  }
  #pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    #pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) store(scores + r * kKeyTile + v * kLanes, sum[r][v]);
  }
}

template <KvDtype T, int Rows>
void score_rows(const float* q, int dim, const uint8_t* tile, int block_size, ptrdiff_t ahead, float* scores) {
  const ptrdiff_t stride = block_size * kLoadBytes<T>;
  int key = 0;
  for (; key + 2 * kLanes <= block_size; key += 2 * kLanes) {
    score_tile<T, Rows, 2>(q, dim, tile + key * kLoadBytes<T>, stride, ahead, scores + key);
  }
  if (key < block_size) score_tile<T, Rows, 1>(q, dim, tile + key * kLoadBytes<T>, stride, ahead, scores + key);
}

// Scores of all rows with all keys of one block, without the keys' scales.
template <KvDtype T>
void score_block(const Queries& queries, const uint8_t* tile, int block_size, ptrdiff_t ahead, float* scores) {
  for (int first = 0; first < queries.rows; first += kRowTile) {
    const float* q = queries.packed + first * queries.dim;
    float* out = scores + first * kKeyTile;
    switch (tile_rows(queries.rows, first)) {
      case 6: if constexpr (kRowTile >= 6) score_rows<T, 6>(q, queries.dim, tile, block_size, ahead, out); break;
      case 5: if constexpr (kRowTile >= 5) score_rows<T, 5>(q, queries.dim, tile, block_size, ahead, out); break;
      case 4: score_rows<T, 4>(q, queries.dim, tile, block_size, ahead, out); break;
      case 3: score_rows<T, 3>(q, queries.dim, tile, block_size, ahead, out); break;
      case 2: score_rows<T, 2>(q, queries.dim, tile, block_size, ahead, out); break;
      default: score_rows<T, 1>(q, queries.dim, tile, block_size, ahead, out); break;
    }
  }
}

// One block as floats, for items whose rows use it more than once: K [dim / beside][keys][beside] as [dim][keys], V
// [keys / beside][dim][beside] as [keys][dim]. *rows* and *columns* are those of the result.
template <KvDtype T>
void decode_block(const uint8_t* tile, int rows, int columns, float* out) {
  constexpr int kBeside = side_by_side(T);
  for (int row = 0; row < rows; row += kBeside, out += kBeside * columns) {
    for (int column = 0; column < columns; column += kLanes) {
      // The last vector begins where it ends with the row; what it has in common with the one before is the same.
      const int at = column + kLanes <= columns ? column : columns - kLanes;
      Vec x[kBeside];
      load_beside<T>(tile + (row / kBeside * columns + at) * kLoadBytes<T>, x);
      #pragma GCC unroll 8
      for (int i = 0; i < kBeside; ++i) store(out + i * columns + at, x[i]);
    }
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
