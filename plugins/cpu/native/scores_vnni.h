// Scores of int8 keys with AVX-512 VNNI: integer dot products of 16-bit queries.
// Included by kernel.h only.
//
// A query row is integers of 16 bits (query_planes). VNNI multiplies unsigned by signed bytes, so the keys are biased
// by 128 and 128 * sum(q) is taken off at the start. The int32 sums may wrap on the way; the result, below 2^31, is
// exact.
#pragma once

#include <immintrin.h>
#include <stddef.h>

#include "scores.h"
#include "softmax16.h"

namespace castline::CASTLINE_ISA {
namespace {

struct IntegerQueries {
  int32_t* packed;  // register tile by register tile, [dim / 4][rows of the tile][high, low], four signed bytes a word
  int32_t* start;   // [rows] where an integer dot product starts
  int rows, dim;
};

// Packs q * scale as row *row*. Returns what a score of the row is to be multiplied by.
float pack_query(const IntegerQueries& queries, int row, const float* q, float scale) {
  int8_t high[kMaxHeadDim], low[kMaxHeadDim];
  int32_t sum;
  const int padded = (queries.dim + kLanes - 1) / kLanes * kLanes;
  const float multiplier = query_planes(q, queries.dim, padded, scale, high, low, &sum);
  const int first = row / kRowTile * kRowTile, rows = tile_rows(queries.rows, first);
  int32_t* out = queries.packed + first * (queries.dim / 2) + 2 * (row - first);
  for (int d = 0; d < queries.dim; d += 4, out += 2 * rows) {
    memcpy(out, high + d, 4);
    memcpy(out + 1, low + d, 4);
  }
  queries.start[row] = static_cast<int32_t>(0u - 128u * static_cast<uint32_t>(sum));
  return multiplier;
}

// sum += dot(u, s) of four unsigned and four signed bytes a lane. Written in assembly because GCC 12 copies the
// accumulators of the intrinsic to other registers and back, and spills them.
CASTLINE_INLINE void add_dot(Int& sum, Int u, Int s) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(s)); }

template <int Rows, int Vectors>
CASTLINE_LOOP void score_tile(const int32_t* q, const int32_t* start, int dim, const uint8_t* keys, ptrdiff_t stride,
                              ptrdiff_t ahead, float* scores) {
  const Int bias = _mm512_set1_epi8(static_cast<char>(0x80));
  Int high[Rows][Vectors], low[Rows][Vectors];
  #pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    #pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) {
      high[r][v] = _mm512_setzero_si512();
      low[r][v] = _mm512_set1_epi32(start[r]);
    }
  }
  for (int d = 0; d < dim; d += 4, q += 2 * Rows, keys += stride) {
    Int k[Vectors];
    #pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) k[v] = _mm512_xor_si512(load_words(keys + v * kLanes * 4), bias);
    fetch_ahead<Vectors * 64>(keys + ahead);
    #pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Int q_high = _mm512_set1_epi32(q[2 * r]), q_low = _mm512_set1_epi32(q[2 * r + 1]);
      #pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) {
        add_dot(high[r][v], k[v], q_high);
        add_dot(low[r][v], k[v], q_low);
      }
    }
  }
  #pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    #pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) {
      const Int sum = _mm512_add_epi32(shift_left<8>(high[r][v]), low[r][v]);
      store(scores + r * kKeyTile + v * kLanes, to_float(sum));
    }
  }
}

template <int Rows>
void score_rows(const int32_t* q, const int32_t* start, int dim, const uint8_t* tile, int block_size, ptrdiff_t ahead,
                float* scores) {
  const ptrdiff_t stride = block_size * 4;
  int key = 0;
  for (; key + 2 * kLanes <= block_size; key += 2 * kLanes) {
    score_tile<Rows, 2>(q, start, dim, tile + key * 4, stride, ahead, scores + key);
  }
  if (key < block_size) score_tile<Rows, 1>(q, start, dim, tile + key * 4, stride, ahead, scores + key);
}

// Scores of all rows with all keys of one block, without the keys' scales.
void score_block(const IntegerQueries& queries, const uint8_t* tile, int block_size, ptrdiff_t ahead, float* scores) {
  for (int first = 0; first < queries.rows; first += kRowTile) {
    const int32_t* q = queries.packed + first * (queries.dim / 2);
    const int32_t* start = queries.start + first;
    float* out = scores + first * kKeyTile;
    switch (tile_rows(queries.rows, first)) {
      case 6: score_rows<6>(q, start, queries.dim, tile, block_size, ahead, out); break;
      case 5: score_rows<5>(q, start, queries.dim, tile, block_size, ahead, out); break;
      case 4: score_rows<4>(q, start, queries.dim, tile, block_size, ahead, out); break;
      case 3: score_rows<3>(q, start, queries.dim, tile, block_size, ahead, out); break;
      case 2: score_rows<2>(q, start, queries.dim, tile, block_size, ahead, out); break;
      default: score_rows<1>(q, start, queries.dim, tile, block_size, ahead, out); break;
    }
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
