// Wide kernels of W8 with one scale a column: the packed bytes are tile operands as they are. Included by
// linear_amx.cpp only.
//
// A row is scaled to integers of 16 bits, x = scale * (256 * high + low) with high and low signed bytes: nearer to the
// row than bf16 is, save for elements under 1/256 of its largest. Tiles multiply signed by unsigned bytes, so 128 times
// the sum of the row's bytes is taken off each sum. All sums of products are exact integers while K < 2^16.
#pragma once

#include "linear_amx_finish.h"

namespace castline::CASTLINE_ISA {
namespace {

constexpr int kStep8 = 64;  // elements of K in a tile of bytes
constexpr float kRowMax = 127 * 256 + 127;

// What the sums of one row need: its scale and 128 times the sums of its high and low bytes.
struct IntegerRow {
  float scale;
  int32_t high, low, unused;
};

static inline int64_t row_bytes_int8(const LinearAttributes& a) { return int64_t{2} * padded_k(a); }

static inline size_t prepared_bytes_int8(const LinearAttributes& a, int64_t rows) {
  return static_cast<size_t>(row_tiles(rows) * kTileRows) * (row_bytes_int8(a) + sizeof(IntegerRow));
}

static inline IntegerRow* integer_rows(const LinearAttributes& a, int64_t rows, const uint8_t* prepared) {
  uint8_t* const after = const_cast<uint8_t*>(prepared) + row_tiles(rows) * kTileRows * row_bytes_int8(a);
  return reinterpret_cast<IntegerRow*>(after);
}

static inline Vec absolute(Vec x) { return _mm512_abs_ps(x); }

static inline float largest_of(const RowSource& source, int count) {
  Vec largest = broadcast(0.0f);
  for (int k = 0; k < count; k += kLanes) largest = max(absolute(source.values(k)), largest);
  return reduce_max(largest);
}

// Activations: [row tile][step of K][high, low][row][64 bytes], then the IntegerRow of each row.
static inline void prepare_int8(const LinearAttributes& a, const LinearStep& s, int64_t first, int64_t last,
                                uint8_t* prepared) {
  const int count = padded_k(a);
  const int64_t tile_bytes = row_bytes_int8(a) * kTileRows;
  IntegerRow* const integers = integer_rows(a, s.rows, prepared);
  for (int64_t row = first; row < last; ++row) {
    const RowSource source(a, s, row, 1.0f);
    const float largest = largest_of(source, count);
    const Vec inverse = broadcast(largest > 0.0f ? kRowMax / largest : 0.0f);
    uint8_t* out = prepared + row / kTileRows * tile_bytes + row % kTileRows * kTileStride;
    Int high_sum = _mm512_setzero_si512(), low_sum = _mm512_setzero_si512();
    for (int k = 0; k < count; k += kStep8, out += 2 * kTileBytes) {
      for (int part = 0; part < kStep8; part += kLanes) {
        const Int x = _mm512_cvtps_epi32(mul(source.values(k + part), inverse));
        const Int high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
        const Int low = _mm512_sub_epi32(x, _mm512_slli_epi32(high, 8));
        high_sum = _mm512_add_epi32(high_sum, high);
        low_sum = _mm512_add_epi32(low_sum, low);
        _mm_store_si128(reinterpret_cast<__m128i*>(out + part), _mm512_cvtepi32_epi8(high));
        _mm_store_si128(reinterpret_cast<__m128i*>(out + kTileBytes + part), _mm512_cvtepi32_epi8(low));
      }
    }
    integers[row] = {largest / kRowMax, 128 * _mm512_reduce_add_epi32(high_sum),
                     128 * _mm512_reduce_add_epi32(low_sum), 0};
  }
  if (last == s.rows) zero_padding(prepared, s.rows, tile_bytes);
}

// Sums of one row tile with both strips: [strip][high, low][row][column].
static inline void multiply_int8(const uint8_t* const strips[2], int64_t steps, const uint8_t* rows, int32_t* sums) {
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  for (int64_t i = 0; i < steps; ++i, rows += 2 * kTileBytes) {
    load_tile<4>(rows);
    load_tile<6>(strips[0] + i * kTileBytes);
    add_product_int8<0, 4, 6>();
    load_tile<7>(strips[1] + i * kTileBytes);
    add_product_int8<2, 4, 7>();
    load_tile<5>(rows + kTileBytes);
    add_product_int8<1, 5, 6>();
    add_product_int8<3, 5, 7>();
  }
  store_tile<0>(sums);
  store_tile<1>(sums + kTileFloats);
  store_tile<2>(sums + 2 * kTileFloats);
  store_tile<3>(sums + 3 * kTileFloats);
}

// Turns the integer sums of one row tile into floats: [strip][row][column], still to be multiplied by column scales.
static inline void scale_rows(const IntegerRow* rows, int count, const int32_t* sums, float* out) {
  for (int strip = 0; strip < 2; ++strip, sums += 2 * kTileFloats, out += kTileFloats) {
    for (int r = 0; r < count; ++r) {
      const Int high = _mm512_sub_epi32(load_words(reinterpret_cast<const uint8_t*>(sums + r * kStrip)),
                                        _mm512_set1_epi32(rows[r].high));
      const Int low = _mm512_sub_epi32(load_words(reinterpret_cast<const uint8_t*>(sums + kTileFloats + r * kStrip)),
                                       _mm512_set1_epi32(rows[r].low));
      const Vec sum = fma(to_float(high), broadcast(256.0f), to_float(low));
      store(out + r * kStrip, mul(sum, broadcast(rows[r].scale)));
    }
  }
}

static inline Vec column_scale(const LinearAttributes& a, const LinearStep& s, int strip) {
  const uint16_t* scales = s.scales + strip * strip_scales(a);
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)));
}

static inline void compute_int8(const LinearAttributes& a, const LinearStep& s, int first, int last,
                                const uint8_t* prepared) {
  alignas(64) int32_t sums[4 * kTileFloats];
  alignas(64) float floats[2 * kTileFloats];
  const int64_t steps = padded_k(a) / kStep8, tile_bytes = 2 * steps * kTileBytes, tiles = row_tiles(s.rows);
  const int64_t block = block_tiles(tile_bytes);
  const IntegerRow* const integers = integer_rows(a, s.rows, prepared);
  const TileScope scope(s.rows);
  for (int64_t first_tile = 0; first_tile < tiles; first_tile += block) {
    const int64_t last_tile = tiles - first_tile < block ? tiles : first_tile + block;
    for (int unit = first; unit < last;) {
      const StripPair pair = strip_pair(a, unit, last);
      const uint8_t* const strips[2] = {s.weight + pair.strip[0] * strip_bytes(a),
                                        s.weight + pair.strip[1] * strip_bytes(a)};
      const Vec scale[2] = {column_scale(a, s, pair.strip[0]), column_scale(a, s, pair.strip[1])};
      for (int64_t tile = first_tile; tile < last_tile; ++tile) {
        multiply_int8(strips, steps, prepared + tile * tile_bytes, sums);
        const int64_t row = tile * kTileRows;
        const int64_t count = s.rows - row < kTileRows ? s.rows - row : kTileRows;
        scale_rows(integers + row, static_cast<int>(count), sums, floats);
        finish_tile(a, s, pair, tile, floats, scale);
      }
      unit += pair.units;
    }
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
