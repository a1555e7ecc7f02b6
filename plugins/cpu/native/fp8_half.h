// Attention over fp8 pools with AVX512_FP16: products and sums of halves, 32 an instruction. Included by kernel.h only.
//
// An element's bits, moved to a half's place, are the element divided by kFp8Scale. Queries and weights are rounded to
// halves, after a power of two has brought them where no sum overflows. Halves add up over a run of 64 dimensions, or of
// 64 keys, in two sums (of even ones and of odd ones), and runs add up in fp32: the sums' own rounding stays below what
// rounding queries to bf16 would do. A row's sums do not depend on how many rows share a register tile.
#pragma once

#include <immintrin.h>

#include "scores.h"
#include "softmax16.h"

namespace castline::CASTLINE_ISA {
namespace {

constexpr int kRun = 64;         // dimensions or keys; kKeyTile is a multiple
constexpr int kHalfLanes = 32;
// Of kRun products of a query below 2^9, or a weight of at most 2^9, and an element, below 2, none overflows.
constexpr int kQueryExponent = 9;
constexpr float kHalfWeight = 512.0f;

CASTLINE_INLINE __mmask32 words_below(int n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1u; }

// Thirty-two pairs of elements as halves: the pairs' first elements, and their second ones.
CASTLINE_INLINE void halves_of_fp8(Int codes, __m512h& even, __m512h& odd) {
  const Int mask = _mm512_set1_epi16(static_cast<short>(0xbf80));
  even = (__m512h)_mm512_and_si512(_mm512_maddubs_epi16(_mm512_set1_epi16(0x0080), codes), mask);
  odd = (__m512h)_mm512_and_si512(_mm512_maddubs_epi16(_mm512_set1_epi16(static_cast<short>(0x8000)), codes), mask);
}

CASTLINE_INLINE __m512h broadcast_pair(uint32_t halves) { return (__m512h)_mm512_set1_epi32(halves); }

// Sixteen floats as halves, each of them twice: a word to broadcast.
CASTLINE_INLINE Int doubled_halves(Vec x) {
  const Int word = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  return _mm512_or_si512(word, shift_left<16>(word));
}

struct HalfQueries {
  uint32_t* packed;  // register tile by register tile, [dim][rows of the tile], each half twice
  int rows, dim;
};

// Packs q * scale as row *row*. Returns what a score of the row is to be multiplied by.
float pack_query(const HalfQueries& queries, int row, const float* q, float scale) {
  alignas(64) uint32_t words[kMaxHeadDim + kLanes];
  Vec largest = broadcast(0.0f);
  for (int d = 0; d < queries.dim; d += kLanes) {
    largest = max(largest, _mm512_abs_ps(load_first(q + d, queries.dim - d)));
  }
  const float magnitude = reduce_max(largest) * scale;
  const bool is_zero = magnitude < 0x1p-100f;  // its power of two could overflow
  const int exponent = is_zero ? 0 : kQueryExponent - 1 - (static_cast<int>(float_bits(magnitude) >> 23) - 127);
  const Vec factor = broadcast(is_zero ? 0.0f : scale), power = broadcast(power_of_two(exponent));
  for (int d = 0; d < queries.dim; d += kLanes) {
    const Vec x = mul(mul(load_first(q + d, queries.dim - d), factor), power);
    _mm512_store_si512(words + d, doubled_halves(x));
  }
  const int first = row / kRowTile * kRowTile, rows = tile_rows(queries.rows, first);
  uint32_t* out = queries.packed + first * queries.dim + row - first;
  for (int d = 0; d < queries.dim; ++d) out[d * rows] = words[d];
  return power_of_two(-exponent) * kFp8Scale;
}

// Sums of Rows rows by Vectors * kHalfLanes columns over a run.
template <int Rows, int Vectors>
struct HalfSums {
  __m512h even[Rows][Vectors], odd[Rows][Vectors];

  CASTLINE_INLINE void clear() {
    #pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      #pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) even[r][v] = odd[r][v] = _mm512_setzero_ph();
    }
  }

  // Adds the products of the pairs at *p*, of which *last* says what of the last vector is there. of_even(r) and
  // of_odd(r) are row r's words.
  template <bool Whole, class Even, class Odd>
  CASTLINE_INLINE void add(const uint8_t* p, __mmask32 last, ptrdiff_t ahead, Even of_even, Odd of_odd) {
    __m512h first[Vectors], second[Vectors];
    #pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) {
      const uint8_t* const at = p + v * 64;
      halves_of_fp8(Whole || v + 1 < Vectors ? load_words(at) : _mm512_maskz_loadu_epi16(last, at), first[v],
                    second[v]);
      fetch(at + ahead);
    }
    #pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const __m512h x = broadcast_pair(of_even(r)), y = broadcast_pair(of_odd(r));
      #pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) {
        even[r][v] = _mm512_fmadd_ph(first[v], x, even[r][v]);
        odd[r][v] = _mm512_fmadd_ph(second[v], y, odd[r][v]);
      }
    }
  }

  // Adds factor * sums to the first *columns* floats of each row of *out*, or writes them where they are the first.
  template <bool Whole>
  CASTLINE_INLINE void flush(bool is_first, float factor, int columns, ptrdiff_t row_floats, float* out) const {
    #pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r, out += row_floats) {
      #pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) {
        Vec x[2];
        floats_of_halves((Int)_mm512_add_ph(even[r][v], odd[r][v]), x[0], x[1]);
        #pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          const int at = v * kHalfLanes + i * kLanes;
          const __mmask16 there = Whole ? lanes_below(kLanes) : lanes_below(columns - at);
          const Vec before = _mm512_maskz_loadu_ps(is_first ? lanes_below(0) : there, out + at);
          _mm512_mask_storeu_ps(out + at, there, fma(x[i], broadcast(factor), before));
        }
      }
    }
  }
};

// scores[r * kKeyTile + i] for Rows rows and the first *count* of kHalfLanes keys: all of them if Whole.
template <int Rows, bool Whole>
CASTLINE_LOOP void score_half_tile(const uint32_t* q, int dim, const uint8_t* keys, int count, ptrdiff_t stride,
                                   ptrdiff_t ahead, float* scores) {
  const __mmask32 there = words_below(count);
  for (int run = 0; run < dim; run += kRun) {
    HalfSums<Rows, 1> sums;
    sums.clear();
    const int end = run + kRun < dim ? run + kRun : dim;
    for (int d = run; d < end; d += 2, q += 2 * Rows, keys += stride) {
      sums.template add<Whole>(
          keys, there, ahead, [q](int r) { return q[r]; }, [q](int r) { return q[Rows + r]; });
    }
    sums.template flush<Whole>(run == 0, 1.0f, count, kKeyTile, scores);
  }
}

template <int Rows>
void score_half_rows(const uint32_t* q, int dim, const uint8_t* tile, int block_size, ptrdiff_t ahead, float* scores) {
  int key = 0;
  for (; key + kHalfLanes <= block_size; key += kHalfLanes) {
    score_half_tile<Rows, true>(q, dim, tile + key * 2, kHalfLanes, block_size * 2, ahead, scores + key);
  }
  if (key < block_size) {
    score_half_tile<Rows, false>(q, dim, tile + key * 2, block_size - key, block_size * 2, ahead, scores + key);
  }
}

// Scores of all rows with all keys of one block, in units of the row's multiplier.
void score_block(const HalfQueries& queries, const uint8_t* tile, int block_size, ptrdiff_t ahead, float* scores) {
  for (int first = 0; first < queries.rows; first += kRowTile) {
    const uint32_t* q = queries.packed + first * queries.dim;
    float* out = scores + first * kKeyTile;
    switch (tile_rows(queries.rows, first)) {
      case 6: score_half_rows<6>(q, queries.dim, tile, block_size, ahead, out); break;
      case 5: score_half_rows<5>(q, queries.dim, tile, block_size, ahead, out); break;
      case 4: score_half_rows<4>(q, queries.dim, tile, block_size, ahead, out); break;
      case 3: score_half_rows<3>(q, queries.dim, tile, block_size, ahead, out); break;
      case 2: score_half_rows<2>(q, queries.dim, tile, block_size, ahead, out); break;
      default: score_half_rows<1>(q, queries.dim, tile, block_size, ahead, out); break;
    }
  }
}

// out[r][dim ..] of Rows rows and Vectors * kHalfLanes dimensions, up to head_dim, over the tile's keys.
// *weights*: rows of kKeyTile words. Keys outside the tile's range, of which one may share a word with a key that is
// not, have weights of 0, and no fp8 element becomes a NaN.
template <int Rows, int Vectors, bool Whole>
CASTLINE_LOOP void half_value_tile(const TileBlocks& tile, int head_dim, int dim, const uint32_t* weights, float* out) {
  const int n = tile.block_size, columns = head_dim - dim;
  const __mmask32 last = words_below(columns - (Vectors - 1) * kHalfLanes);
  HalfSums<Rows, Vectors> sums;
  sums.clear();
  for (int b = tile.first_key / n; b * n < tile.last_key; ++b) {
    const int begin = tile.first_key > b * n ? tile.first_key / 2 * 2 : b * n;
    const int end = tile.last_key < (b + 1) * n ? tile.last_key : (b + 1) * n;
    const uint8_t* values = tile.block[b].v + ((begin - b * n) / 2 * head_dim + dim) * 2;
    const ptrdiff_t ahead = tile.ahead_of_v(b);
    for (int key = begin; key < end; key += 2, values += head_dim * 2) {
      const uint32_t* const w = weights + key;
      sums.template add<Whole>(
          values, last, ahead, [w](int r) { return w[r * kKeyTile]; }, [w](int r) { return w[r * kKeyTile + 1]; });
      if ((key + 2) % kRun == 0 || key + 2 >= tile.last_key) {
        const bool is_first = key / kRun == tile.first_key / kRun;
        sums.template flush<Whole>(is_first, kFp8Scale / kHalfWeight, columns, head_dim, out + dim);
        sums.clear();
      }
    }
  }
}

template <int Rows>
void half_value_rows(const TileBlocks& tile, int head_dim, const uint32_t* weights, float* out) {
  constexpr int kWide = Rows <= 5 ? 2 : 1;  // as many as there are registers for
  int dim = 0;
  for (; dim + kWide * kHalfLanes <= head_dim; dim += kWide * kHalfLanes) {
    half_value_tile<Rows, kWide, true>(tile, head_dim, dim, weights, out);
  }
  for (; dim < head_dim; dim += kHalfLanes) half_value_tile<Rows, 1, false>(tile, head_dim, dim, weights, out);
}

// out[rows][head_dim] = weights * V over the tile's keys.
void half_values(const TileBlocks& tile, int rows, int head_dim, const uint32_t* weights, float* out) {
  for (int first = 0; first < rows; first += kRowTile) {
    const uint32_t* w = weights + first * kKeyTile;
    float* o = out + first * head_dim;
    switch (tile_rows(rows, first)) {
      case 6: half_value_rows<6>(tile, head_dim, w, o); break;
      case 5: half_value_rows<5>(tile, head_dim, w, o); break;
      case 4: half_value_rows<4>(tile, head_dim, w, o); break;
      case 3: half_value_rows<3>(tile, head_dim, w, o); break;
      case 2: half_value_rows<2>(tile, head_dim, w, o); break;
      default: half_value_rows<1>(tile, head_dim, w, o); break;
    }
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
