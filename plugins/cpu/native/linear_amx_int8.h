// Wide kernels of W8 with one scale a column: the packed bytes are tile operands as they are. Included by
// linear_amx.cpp only.
//
// A row is scaled to integers of 16 bits, x = scale * (256 * high + low) with high and low signed bytes: nearer to the
// row than bf16 is, save for elements under 1/256 of its largest. Tiles multiply signed by unsigned bytes, so 128 times
// the sum of the row's bytes is taken off each sum. Integer sums wrap on the way;
// the results are exact while K < 2^17.
#pragma once

#include "linear_amx_finish.h"
#include "linear_amx_weights.h"
#include "linear_prologue.h"

namespace castline::CASTLINE_ISA {
namespace {

constexpr int kStep8 = 64;  // elements of K in a tile of bytes
constexpr float kRowMax = 127 * 256 + 127;

// What the sums of one row need: its scale and 128 times the sums of its high and low bytes.
struct IntegerRow {
  float scale;
  uint32_t high, low, unused;
};

static inline int64_t row_bytes_int8(const LinearAttributes& a) { return int64_t{2} * padded_k(a); }

static inline size_t prepared_bytes_int8(const LinearAttributes& a, int64_t rows) {
  return static_cast<size_t>(row_tiles(rows) * kTileRows) * (row_bytes_int8(a) + sizeof(IntegerRow));
}

static inline IntegerRow* integer_rows(const LinearAttributes& a, int64_t rows, const uint8_t* prepared) {
  uint8_t* const after = const_cast<uint8_t*>(prepared) + row_tiles(rows) * kTileRows * row_bytes_int8(a);
  return reinterpret_cast<IntegerRow*>(after);
}

// Activations: [row tile][step of K][high, low][row][64 bytes], then the IntegerRow of each row.
static inline void prepare_int8(const LinearAttributes& a, const LinearStep& s, int64_t first, int64_t last,
                                uint8_t* prepared) {
  const int groups = padded_k(a) / kActivationGroup;
  const int64_t tile_bytes = row_bytes_int8(a) * kTileRows;
  IntegerRow* const integers = integer_rows(a, s.rows, prepared);
  for (int64_t row = first; row < last; ++row) {
    const float factor = row_factor(a, s, row);
    alignas(64) float h[kActivationGroup];
    Int largest_bits = _mm512_setzero_si512();
    for (int group = 0; group < groups; ++group) {
      norm_group(a, s, row, factor, group, h);
      for (int i = 0; i < kActivationGroup; i += kLanes) largest_bits = max_int(largest_bits, magnitude(load(h + i)));
    }
    // A NaN or an infinity makes the scale one too, so that the result shows it.
    const float largest = bits_float(static_cast<uint32_t>(reduce_max_int(largest_bits)));
    const Vec inverse = broadcast(largest > 1e-30f && largest < INFINITY ? kRowMax / largest : 0.0f);
    uint8_t* out = prepared + row / kTileRows * tile_bytes + row % kTileRows * kTileStride;
    Int high_sum = _mm512_setzero_si512(), low_sum = _mm512_setzero_si512();
    for (int group = 0; group < groups; ++group) {
      norm_group(a, s, row, factor, group, h);
      uint8_t* const to = out + group / 2 * 2 * kTileBytes + group % 2 * kActivationGroup;
      for (int i = 0; i < kActivationGroup; i += kLanes) {
        const Int x = _mm512_cvtps_epi32(mul(load(h + i), inverse));
        const Int high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
        const Int low = _mm512_sub_epi32(x, _mm512_slli_epi32(high, 8));
        high_sum = _mm512_add_epi32(high_sum, high);
        low_sum = _mm512_add_epi32(low_sum, low);
        _mm_store_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(high));
        _mm_store_si128(reinterpret_cast<__m128i*>(to + kTileBytes + i), _mm512_cvtepi32_epi8(low));
      }
    }
    integers[row] = {largest / kRowMax, 128u * static_cast<uint32_t>(_mm512_reduce_add_epi32(high_sum)),
                     128u * static_cast<uint32_t>(_mm512_reduce_add_epi32(low_sum)), 0};
  }
  if (last == s.rows) zero_padding(prepared, s.rows, tile_bytes);
}

// Sums of one row tile, [strip][high, low][row][column].
struct IntegerSums {
  const int32_t* sums;
  const IntegerRow* rows;

  CASTLINE_INLINE void row(int64_t row, Vec out[2]) const {
    const IntegerRow& integers = rows[row];
    for (int strip = 0; strip < 2; ++strip) {
      const int32_t* from = sums + strip * 2 * kTileFloats + row * kStrip;
      const Int high = _mm512_sub_epi32(load_line(from), _mm512_set1_epi32(static_cast<int>(integers.high)));
      const Int low =
          _mm512_sub_epi32(load_line(from + kTileFloats), _mm512_set1_epi32(static_cast<int>(integers.low)));
      const Vec sum = fma(to_float(high), broadcast(256.0f), to_float(low));
      out[strip] = mul(sum, broadcast(integers.scale));
    }
  }
};

// Adds the products of one row tile, and fetches the strips to come where the strips are read for the first time.
template <bool Fetch>
void multiply_int8(const uint8_t* const strips[2], int64_t steps, const uint8_t* rows, int32_t* sums,
                                 Finisher<IntegerSums>& finisher) {
  const int64_t finished = (kTileRows + steps - 1) / steps;
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  const int64_t ahead = kStripsAhead * steps * kTileBytes;
  for (int64_t i = 0; i < steps; ++i, rows += 2 * kTileBytes) {
    for (int line = 0; Fetch && line < kTileBytes; line += kTileStride) {
      _mm_prefetch(reinterpret_cast<const char*>(strips[0] + i * kTileBytes + ahead + line), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(strips[1] + i * kTileBytes + ahead + line), _MM_HINT_T1);
    }
    stream_tile<4>(rows);
    load_tile<6>(strips[0] + i * kTileBytes);
    add_product_int8<0, 4, 6>();
    load_tile<7>(strips[1] + i * kTileBytes);
    add_product_int8<2, 4, 7>();
    stream_tile<5>(rows + kTileBytes);
    add_product_int8<1, 5, 6>();
    add_product_int8<3, 5, 7>();
    finisher.advance(finished);
  }
  store_tile<0>(sums);
  store_tile<1>(sums + kTileFloats);
  store_tile<2>(sums + 2 * kTileFloats);
  store_tile<3>(sums + 3 * kTileFloats);
}

static inline Vec column_scale(const LinearAttributes& a, const LinearStep& s, int strip) {
  return lower_floats(load_half_line(s.scales + strip * strip_scales(a)));
}

static inline void compute_int8(const LinearAttributes& a, const LinearStep& s, int first, int last,
                                const uint8_t* prepared) {
  alignas(64) int32_t sums[2][4 * kTileFloats];
  const int64_t steps = padded_k(a) / kStep8, tile_bytes = 2 * steps * kTileBytes, tiles = row_tiles(s.rows);
  const int64_t block = block_tiles(tile_bytes);
  const IntegerRow* const integers = integer_rows(a, s.rows, prepared);
  const TileScope scope(s.rows);
  Finisher<IntegerSums> finisher(a, s);
  int buffer = 0;
  for (int64_t first_tile = 0; first_tile < tiles; first_tile += block) {
    const int64_t last_tile = tiles - first_tile < block ? tiles : first_tile + block;
    for (int unit = first; unit < last;) {
      const StripPair pair = strip_pair(a, unit, last);
      const uint8_t* const strips[2] = {s.weight + pair.strip[0] * strip_bytes(a),
                                        s.weight + pair.strip[1] * strip_bytes(a)};
      const Vec scale[2] = {column_scale(a, s, pair.strip[0]), column_scale(a, s, pair.strip[1])};
      for (int64_t tile = first_tile; tile < last_tile; ++tile, buffer ^= 1) {
        const auto multiply = tile == first_tile ? multiply_int8<true> : multiply_int8<false>;
        multiply(strips, steps, prepared + tile * tile_bytes, sums[buffer], finisher);
        finisher.finish();
        finisher.begin(pair, scale, tile * kTileRows, 1, {sums[buffer], integers + tile * kTileRows});
      }
      unit += pair.units;
    }
  }
  finisher.finish();
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
