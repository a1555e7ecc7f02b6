// Items of one strip over fp8 pools: the sums of the strips in tile_attend.h, in the same order, but each part of K and
// V becomes bf16 while the matrix unit works on the part before. Included by tile_attend.h only.
#pragma once

#include <type_traits>

#include "tile_products.h"

namespace castline::CASTLINE_ISA {
namespace {

// Rows of *words* words of two fp8 elements, *stride* words apart, as rows of Vectors * 16 words of bf16. Past the end
// of a row are zeros. *rows* is even. What is *ahead* bytes further is fetched meanwhile, a line at a time: a burst of
// lines would hold up the loads that are waited for.
template <int Vectors>
CASTLINE_INLINE void convert_words(const uint8_t* from, ptrdiff_t stride, int rows, int words, ptrdiff_t out_words,
                                   uint8_t* out, ptrdiff_t ahead) {
  constexpr int kPairs = Vectors / 2, kLeft = Vectors % 2;  // a vector that is left goes with the next row's
  const int width = words - 32 * kPairs;
  const bool is_whole = kLeft == 1 || width >= 0;
  const __mmask32 last = words_below(width + 32);
  const __mmask16 left = lanes_below(width);
  const auto convert = [&](Int codes, uint8_t* first, uint8_t* second) {
    const Bf16Halves x = bf16_of_fp8(codes);
    _mm512_storeu_si512(first, x.first);
    _mm512_storeu_si512(second, x.second);
  };
  for (int row = 0; row < rows; ++row, from += 2 * stride, out += 4 * out_words) {
    #pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
      const uint8_t* const at = from + 64 * p;
      _mm_prefetch(reinterpret_cast<const char*>(at + ahead), _MM_HINT_T0);
      const Int codes = is_whole || p + 1 < kPairs ? load_words(at) : _mm512_maskz_loadu_epi16(last, at);
      convert(codes, out + 128 * p, out + 128 * p + 64);
    }
    if (kLeft == 1 && row % 2 == 0) {
      const uint8_t *const at = from + 64 * kPairs, *const below = at + 2 * stride;
      _mm_prefetch(reinterpret_cast<const char*>(at + ahead), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(below + ahead), _MM_HINT_T0);
      const Int codes = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi16(left, at)),
                                           _mm256_maskz_loadu_epi16(left, below), 1);
      convert(codes, out + 128 * kPairs, out + 128 * kPairs + 4 * out_words);
    }
  }
}

constexpr int kPartKeys = 2 * kGroup;  // of a part of K: those of a piece of q.k; of V: those of a step of P.V
constexpr int kMostGroups = 4;  // of dimensions that P.V takes at a time: as many as there are registers for sums
constexpr int kValuePart = kDepth * kMostGroups * kTileBytes;  // bytes of a part of V

// Parts of K and V as bf16, two of each by turns: one is read by the matrix unit while the other is written.
struct FewRows {
  const TileBlocks& tile;
  int head_dim;
  uint8_t* k_parts[2];  // [dimensions / 2][kPartKeys] words
  uint8_t* v_parts[2];  // [kDepth][Groups * kGroup] words

  const uint8_t* keys_at(int key) const {
    return tile.block[key / tile.block_size].k + key % tile.block_size * 2;
  }
  const uint8_t* values_at(int key) const {
    return tile.block[key / tile.block_size].v + key % tile.block_size * head_dim;
  }

  // Calls f(key, keys, whether the tile has any of them) for each run of keys of part *part* that lie in one block.
  template <class Function>
  CASTLINE_INLINE void for_blocks(int part, Function f) const {
    const int n = tile.block_size, width = n < kPartKeys ? n : kPartKeys;
    for (int key = part * kPartKeys; key < (part + 1) * kPartKeys; key += width) {
      f(key, width, key / n >= tile.first_key / n && key < tile.last_key);
    }
  }

  void convert_keys(int part) const {
    for_blocks(part, [&](int key, int width, bool used) {
      if (!used) return;  // their scores are masked
      uint8_t* const out = k_parts[part % 2] + key % kPartKeys * 4;
      const uint8_t* const from = keys_at(key);
      const ptrdiff_t ahead = tile.ahead_of_k(key / tile.block_size);
      if (width == kPartKeys) {
        convert_words<2>(from, tile.block_size, head_dim / 2, kPartKeys, kPartKeys, out, ahead);
      } else {
        convert_words<1>(from, tile.block_size, head_dim / 2, kGroup, kPartKeys, out, ahead);
      }
    });
  }

  // Keys outside the tile's range have weights of 0, and no fp8 element becomes a NaN.
  template <int Groups>
  void convert_values(int step, int group) const {
    const int dim = group * kGroup, width_bytes = Groups * kTileBytes;
    for_blocks(step, [&](int key, int width, bool used) {
      uint8_t* const out = v_parts[step % 2] + key % kPartKeys / 2 * width_bytes;
      if (!used) {
        memset(out, 0, width / 2 * width_bytes);
        return;
      }
      const uint8_t* const from = values_at(key);
      const ptrdiff_t ahead = tile.ahead_of_v(key / tile.block_size);
      convert_words<Groups>(from + 2 * dim, head_dim, width / 2, head_dim - dim, Groups * kGroup, out, ahead);
    });
  }
};

// Scores of the keys low .. high, and of others in their parts.
void score_few_rows(const FewRows& f, const uint8_t* queries, int low, int high, uint8_t* scores) {
  const int steps = round_up(f.head_dim, kStep<kFp8>) / kStep<kFp8>;
  const int first = low / kPartKeys, last = (high + kPartKeys - 1) / kPartKeys;
  const int filled = f.head_dim / 2 * kPartKeys * 4, all = steps * kDepth * kPartKeys * 4;
  for (uint8_t* part : f.k_parts) memset(part + filled, 0, all - filled);
  RightOperands right;
  right.k_stride = kPartKeys * 4;
  PendingSums pending;
  const auto piece = [&](auto set, int part) {
    constexpr int kSet = decltype(set)::value;
    right.k[0] = f.k_parts[part % 2];
    right.k[1] = right.k[0] + kTileBytes;
    score_piece<kFp8, kSet>(queries, steps, right, 0);
    store_sums<1 - kSet>(pending);
    pending = {scores + part * 2 * kTileBytes, kScoreStride<kFp8>, 2, kSet};
  };
  f.convert_keys(first);
  for (int part = first; part < last; ++part) {
    if (part + 1 < last) f.convert_keys(part + 1);
    if ((part - first) % 2 == 0) {
      piece(std::integral_constant<int, 0>(), part);
    } else {
      piece(std::integral_constant<int, 1>(), part);
    }
  }
  pending.set == 0 ? store_sums<0>(pending) : store_sums<1>(pending);
}

template <int I>
CASTLINE_INLINE void add_value_group(const uint8_t* right, ptrdiff_t stride) {
  tile_load<kRight + I % 2>(right + I * kTileBytes, stride);
  tile_product<Product::kBf16, I, kLeft, kRight + I % 2>();
}

// P.V of Groups groups of dimensions over the steps first .. last.
template <int Groups>
void sum_groups(const FewRows& f, const uint8_t* weights, int group, int first, int last, uint8_t* products) {
  tile_zero<0>();
  if constexpr (Groups > 1) tile_zero<1>();
  if constexpr (Groups > 2) tile_zero<2>();
  if constexpr (Groups > 3) tile_zero<3>();
  constexpr ptrdiff_t stride = Groups * kTileBytes;
  f.convert_values<Groups>(first, group);
  for (int s = first; s < last; ++s) {
    if (s + 1 < last) f.convert_values<Groups>(s + 1, group);
    const uint8_t* const right = f.v_parts[s % 2];
    load_left<kFp8>(weights + s * kTileBytes, kWeightStride<kFp8>, 0);
    add_value_group<0>(right, stride);
    if constexpr (Groups > 1) add_value_group<1>(right, stride);
    if constexpr (Groups > 2) add_value_group<2>(right, stride);
    if constexpr (Groups > 3) add_value_group<3>(right, stride);
  }
  products += group * kTileBytes;
  const ptrdiff_t row = product_stride<kFp8>(f.head_dim);
  tile_store<0>(products, row);
  if constexpr (Groups > 1) tile_store<1>(products + kTileBytes, row);
  if constexpr (Groups > 2) tile_store<2>(products + 2 * kTileBytes, row);
  if constexpr (Groups > 3) tile_store<3>(products + 3 * kTileBytes, row);
}

// P.V over the keys low .. high.
void sum_few_rows(const FewRows& f, const uint8_t* weights, int low, int high, uint8_t* products) {
  const int first = low / kPartKeys, last = (high + kPartKeys - 1) / kPartKeys;
  const int groups = (f.head_dim + kGroup - 1) / kGroup;
  int group = 0;
  for (; group + kMostGroups <= groups; group += kMostGroups) {
    sum_groups<kMostGroups>(f, weights, group, first, last, products);
  }
  switch (groups - group) {
    case 3: sum_groups<3>(f, weights, group, first, last, products); break;
    case 2: sum_groups<2>(f, weights, group, first, last, products); break;
    case 1: sum_groups<1>(f, weights, group, first, last, products); break;
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
