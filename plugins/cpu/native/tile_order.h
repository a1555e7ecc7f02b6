// Items of few rows over fp8 pools with vector instructions, which are faster there than matrix ones and give the same
// bits. Included by tile_attend.h only.
//
// A matrix instruction adds up the products of the even and of the odd elements of a step apart, each in order and from
// 0, and adds the sum of the two to its accumulator: so do these loops. Operands are the floats that its bf16 are.
#pragma once

#include "kernel.h"
#include "tile_operands.h"

#include <type_traits>

namespace castline::CASTLINE_ISA {
namespace {

constexpr int kOrderStep = kStep<kFp8>;

// The left operand of a step: element i of row r is at base[i * I + r * R].
template <int I, int R>
struct Left {
  const float* base;
};

// out[r][0 .. columns) of Rows rows, *out_stride* apart, gets the products of a step of *depth* elements with *right*,
// halves [depth][stride], added. Up to Vectors * kLanes columns.
template <int Rows, int Vectors, int I, int R>
CASTLINE_LOOP void add_step(Left<I, R> left, const uint16_t* right, ptrdiff_t stride, int depth, int columns,
                            float* out, ptrdiff_t out_stride) {
  Vec even[Rows][Vectors], odd[Rows][Vectors];
  #pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    #pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) even[r][v] = odd[r][v] = broadcast(0.0f);
  }
  const float* at = left.base;
  for (int i = 0; i < depth; i += 2, at += 2 * I, right += 2 * stride) {
    Vec x[Vectors];
    #pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) x[v] = load_half(right + v * kLanes);
    #pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Vec q = broadcast(at[r * R]);
      #pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) even[r][v] = fma(x[v], q, even[r][v]);
    }
    #pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) x[v] = load_half(right + stride + v * kLanes);
    #pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Vec q = broadcast(at[I + r * R]);
      #pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) odd[r][v] = fma(x[v], q, odd[r][v]);
    }
  }
  #pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    #pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) {
      float* const to = out + r * out_stride + v * kLanes;
      const int n = columns - v * kLanes;
      store_first(to, n, add(load_first(to, n), add(even[r][v], odd[r][v])));
    }
  }
}

// As above, for any number of columns. What the last load reads past a row is in the next, or in slack behind the last.
template <int Rows, int I, int R>
void add_columns(Left<I, R> left, const uint16_t* right, int depth, int columns, float* out, ptrdiff_t out_stride) {
  constexpr int kWide = Rows <= 3 ? 4 : 2;
  int c = 0;
  for (; c + kWide * kLanes <= columns; c += kWide * kLanes) {
    add_step<Rows, kWide>(left, right + c, columns, depth, columns - c, out + c, out_stride);
  }
  for (; c + 2 * kLanes <= columns; c += 2 * kLanes) {
    add_step<Rows, 2>(left, right + c, columns, depth, columns - c, out + c, out_stride);
  }
  for (; c < columns; c += kLanes) {
    add_step<Rows, 1>(left, right + c, columns, depth, columns - c, out + c, out_stride);
  }
}

// Calls f(Rows as a constant, the first row) for each register tile of rows.
template <class Function>
CASTLINE_INLINE void for_row_tiles(int rows, Function f) {
  for (int first = 0; first < rows; first += kRowTile) {
    switch (tile_rows(rows, first)) {
      case 6: f(std::integral_constant<int, 6>(), first); break;
      case 5: f(std::integral_constant<int, 5>(), first); break;
      case 4: f(std::integral_constant<int, 4>(), first); break;
      case 3: f(std::integral_constant<int, 3>(), first); break;
      case 2: f(std::integral_constant<int, 2>(), first); break;
      default: f(std::integral_constant<int, 1>(), first); break;
    }
  }
}

// Thirty-two floats rounded to bf16, times kFp8Scale.
CASTLINE_INLINE void store_rounded_to_bf16(const Vec x[2], float* out) {
  const Int words = (Int)_mm512_cvtne2ps_pbh(x[1], x[0]);
  const __m256i half[2] = {_mm512_castsi512_si256(words), _mm512_extracti64x4_epi64(words, 1)};
  for (int i = 0; i < 2; ++i) {
    const Vec back = as_float(shift_left<16>(_mm512_cvtepu16_epi32(half[i])));
    store(out + i * kLanes, mul(back, broadcast(kFp8Scale)));
  }
}

// What attend_item asks of an order of sums (see VectorOrder).
struct TileOrder {
  static void pack_row(const Attributes& a, int rows, const Scratch& s, int row, const float* q) {
    float rounded[kMaxHeadDim];
    for (int d = 0; d < a.head_dim; d += 2 * kLanes) {
      Vec x[2];
      for (int i = 0; i < 2; ++i) {
        const int at = d + i * kLanes;
        x[i] = mul(load_first(q + at, a.head_dim - at), broadcast(a.scale * kLog2E));
      }
      store_rounded_to_bf16(x, rounded + d);
    }
    pack_query(Queries{s.q, rows, a.head_dim}, row, rounded);
  }

  static void attend_tile(const Attributes& a, const TileBlocks& tile, const Rows& rows, int tile_start,
                          const Scratch& s) {
    score(a, tile, rows.count, s);
    const int first_low = first_key(a, rows, 0) - tile_start, last_high = rows.position(rows.count - 1) + 1 - tile_start;
    constexpr int kGroups = kOrderStep / kGroup;
    const int first = (first_low > 0 ? first_low : 0) / kOrderStep * kGroups;
    const int last = ((last_high < kKeyTile ? last_high : kKeyTile) + kOrderStep - 1) / kOrderStep * kGroups;
    for (int r = 0; r < rows.count; ++r) {
      const auto place = [&](int g) { return s.scores + r * kKeyTile + g * kGroup; };
      const auto read = [&](int g) { return load(place(g)); };
      const auto write = [&](int g, const Vec* p) { store_rounded_to_bf16(p, place(g)); };
      const RowSoftmax x = softmax_row<kFp8, kGroups>(*s.scales, first_key(a, rows, r) - tile_start,
                                                      rows.position(r) + 1 - tile_start, first, last, 1.0f,
                                                      a.softcap * kLog2E, read, place, write);
      s.tile_max[r] = x.max;
      s.tile_total[r] = x.total;
    }
    sum_values(a, tile, rows.count, s);
  }

 private:
  static uint16_t* halves(const Scratch& s) { return reinterpret_cast<uint16_t*>(s.decoded); }

  static void score(const Attributes& a, const TileBlocks& tile, int rows, const Scratch& s) {
    const int n = tile.block_size, width = n < kOrderStep ? n : kOrderStep;
    for (int key = tile.first_key / width * width; key < tile.last_key; key += width) {
      decode_halves(tile.block[key / n].k + 2 * (key % n), n, a.head_dim / 2, width, halves(s));
      for_row_tiles(rows, [&](auto count, int first) {
        constexpr int kRows = decltype(count)::value;
        float* const out = s.scores + first * kKeyTile + key;
        for (int r = 0; r < kRows; ++r) memset(out + r * kKeyTile, 0, sizeof(float) * width);
        for (int d = 0; d < a.head_dim; d += kOrderStep) {
          const Left<kRows, 1> q = {s.q + first * a.head_dim + d * kRows};
          const int depth = a.head_dim - d < kOrderStep ? a.head_dim - d : kOrderStep;
          add_columns<kRows>(q, halves(s) + d * width, depth, width, out, kKeyTile);
        }
      });
    }
  }

  // Keys outside the tile's range have weights of 0, and no fp8 element becomes a NaN.
  static void sum_values(const Attributes& a, const TileBlocks& tile, int rows, const Scratch& s) {
    const int n = tile.block_size, dim = a.head_dim;
    memset(s.tile_sum, 0, sizeof(float) * rows * dim);
    const int begin = tile.first_key / n * n, end = (tile.last_key + n - 1) / n * n;
    for (int step = tile.first_key / kOrderStep * kOrderStep; step < tile.last_key; step += kOrderStep) {
      const int low = step > begin ? step : begin, high = step + kOrderStep < end ? step + kOrderStep : end;
      const int width = n < kOrderStep ? n : kOrderStep;
      for (int key = low; key < high; key += width) {
        const uint8_t* const from = tile.block[key / n].v + key % n * dim;
        decode_halves(from, dim, width / 2, dim, halves(s) + (key - low) * dim);
      }
      for_row_tiles(rows, [&](auto count, int first) {
        constexpr int kRows = decltype(count)::value;
        const Left<1, kKeyTile> weights = {s.scores + first * kKeyTile + low};
        add_columns<kRows>(weights, halves(s), high - low, dim, s.tile_sum + first * dim, dim);
      });
    }
  }
};

}  // namespace
}  // namespace castline::CASTLINE_ISA
