// The weighted sum of int8 V with AVX-512 VNNI: integer dot products of 16-bit weights. Included by kernel.h only.
//
// VNNI multiplies unsigned weights by signed values, as they are. A sum of 256 products of 65535 and 127 is below 2^31.
#pragma once

#include "scores_vnni.h"

namespace castline::CASTLINE_ISA {
namespace {

// out[r][dim ..] of Rows rows and Vectors * kLanes dimensions, the last vector up to head_dim, over the tile's keys.
// *weights*: rows of [kKeyTile / kPlaneWidth][high, low][kPlaneWidth] bytes, kKeyTile * 4 bytes apart, in units[r].
template <int Rows, int Vectors>
CASTLINE_LOOP void integer_value_tile(const TileBlocks& tile, int head_dim, int dim, const uint8_t* weights,
                                      const float* units, float* out) {
  Int high[Rows][Vectors], low[Rows][Vectors];
  #pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    #pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) high[r][v] = low[r][v] = _mm512_setzero_si512();
  }
  const int n = tile.block_size;
  for (int b = tile.first_key / n; b * n < tile.last_key; ++b) {
    const uint8_t* values = tile.block[b].v + dim * 4;
    const ptrdiff_t ahead = tile.ahead_of_v(b);
    const int last = tile.last_key < (b + 1) * n ? tile.last_key : (b + 1) * n;
    for (int key = b * n; key < last; key += 4, values += head_dim * 4) {
      const uint8_t* w = weights + key / kPlaneWidth * 2 * kPlaneWidth + key % kPlaneWidth;
      Int x[Vectors];
      #pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) x[v] = load_words(values + v * kLanes * 4);
      fetch_ahead<Vectors * 64>(values + ahead);
      #pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r, w += kKeyTile * 4) {
        int32_t words[2];
        memcpy(words, w, 4);
        memcpy(words + 1, w + kPlaneWidth, 4);
        const Int w_high = _mm512_set1_epi32(words[0]), w_low = _mm512_set1_epi32(words[1]);
        #pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) {
          add_dot(high[r][v], w_high, x[v]);
          add_dot(low[r][v], w_low, x[v]);
        }
      }
    }
  }
  #pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    #pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) {
      const Vec sum = mul(to_float(_mm512_add_epi32(shift_left<8>(high[r][v]), low[r][v])), broadcast(units[r]));
      const int at = dim + v * kLanes;
      _mm512_mask_storeu_ps(out + r * head_dim + at, lanes_below(head_dim - at), sum);
    }
  }
}

template <int Rows>
void integer_value_rows(const TileBlocks& tile, int head_dim, const uint8_t* weights, const float* units, float* out) {
  constexpr int kWide = Rows <= 3 ? 4 : 2;
  int dim = 0;
  for (; dim + kWide * kLanes <= head_dim; dim += kWide * kLanes) {
    integer_value_tile<Rows, kWide>(tile, head_dim, dim, weights, units, out);
  }
  // What a vector reads past the end of a row is in the block: the next row, or the scales.
  for (; dim < head_dim; dim += kLanes) integer_value_tile<Rows, 1>(tile, head_dim, dim, weights, units, out);
}

// out[rows][head_dim] = weights * V over the tile's keys.
void integer_values(const TileBlocks& tile, int rows, int head_dim, const uint8_t* weights, const float* units,
                    float* out) {
  for (int first = 0; first < rows; first += kRowTile) {
    const uint8_t* w = weights + first * kKeyTile * 4;
    float* o = out + first * head_dim;
    switch (tile_rows(rows, first)) {
      case 6: integer_value_rows<6>(tile, head_dim, w, units + first, o); break;
      case 5: integer_value_rows<5>(tile, head_dim, w, units + first, o); break;
      case 4: integer_value_rows<4>(tile, head_dim, w, units + first, o); break;
      case 3: integer_value_rows<3>(tile, head_dim, w, units + first, o); break;
      case 2: integer_value_rows<2>(tile, head_dim, w, units + first, o); break;
      default: integer_value_rows<1>(tile, head_dim, w, units + first, o); break;
    }
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
