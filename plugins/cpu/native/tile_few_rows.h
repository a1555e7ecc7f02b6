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
  const Bf16OfFp8 bf16;
  const auto convert = [&bf16](Int codes, uint8_t* first, uint8_t* second) {
    const Bf16Halves x = bf16(codes);
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

constexpr int kPartKeys = 2 * kGroup;  // keys of a piece of K, and of a step of P.V
constexpr int kMostGroups = 4;  // of dimensions that P.V takes at a time: as many as there are registers for sums

// K and V as bf16, a piece of two right operands at a time: one piece is read by the matrix unit while the next is
// written. Both lie in 4096 bytes: a load waits for an earlier store whose address ends in the same twelve bits.
constexpr int kFewPiece = 2 * kDepth * kTileBytes;

// kGroup keys of one block; none where k is nullptr.
struct KeyRun {
  const uint8_t *k, *v;
  ptrdiff_t k_ahead, v_ahead;  // see TileBlocks
};

struct FewRows {
  int head_dim, block_size;
  uint8_t* pieces;
  KeyRun runs[kKeyTile / kGroup] = {};

  FewRows(const TileBlocks& tile, int dim, uint8_t* panel) : head_dim(dim), block_size(tile.block_size), pieces(panel) {
    const int runs_of_block = block_size / kGroup;
    for (int b = tile.first_key / block_size; b * block_size < tile.last_key; ++b) {
      const HeadBlock& block = tile.block[b];
      const ptrdiff_t k_ahead = tile.ahead_of_k(b), v_ahead = tile.ahead_of_v(b);
      for (int i = 0; i < runs_of_block; ++i) {
        runs[b * runs_of_block + i] = {block.k + i * kGroup * 2, block.v + i * kGroup * dim, k_ahead, v_ahead};
      }
    }
  }

  uint8_t* piece(int i) const { return pieces + i % 2 * kFewPiece; }

  // Step *step* of the dimensions of kPartKeys keys, as [kDepth][kPartKeys] words. Keys of blocks that the tile does not
  // have are left: their scores are masked.
  CASTLINE_INLINE void convert_keys(int part, int step, uint8_t* out) const {
    const int left = head_dim / 2 - step * kDepth, rows = left < kDepth ? left : kDepth;
    const int at = step * kDepth * block_size * 2;
    const KeyRun* const run = runs + part * kPartKeys / kGroup;
    if (block_size >= kPartKeys) {
      convert_words<2>(run->k + at, block_size, rows, kPartKeys, kPartKeys, out, run->k_ahead);
    } else {
      for (int i = 0; i < 2; ++i) {
        if (run[i].k == nullptr) continue;
        convert_words<1>(run[i].k + at, kGroup, rows, kGroup, kPartKeys, out + i * kTileBytes, run[i].k_ahead);
      }
    }
    if (rows < kDepth) memset(out + rows * kPartKeys * 4, 0, (kDepth - rows) * kPartKeys * 4);
  }

  // Groups of dimensions of kPartKeys keys, as [kDepth][Groups * kGroup] words. Keys outside the tile's range have
  // weights of 0, and no fp8 element becomes a NaN.
  template <int Groups>
  CASTLINE_INLINE void convert_values(int step, int group, uint8_t* out) const {
    const int at = 2 * group * kGroup, words = head_dim - group * kGroup;
    const KeyRun* const run = runs + step * kPartKeys / kGroup;
    if (block_size >= kPartKeys) {
      convert_words<Groups>(run->v + at, head_dim, kDepth, words, Groups * kGroup, out, run->v_ahead);
      return;
    }
    constexpr int kHalf = kDepth / 2, kHalfBytes = kHalf * Groups * kTileBytes;
    for (int i = 0; i < 2; ++i, out += kHalfBytes) {
      if (run[i].v == nullptr) {
        memset(out, 0, kHalfBytes);
      } else {
        convert_words<Groups>(run[i].v + at, head_dim, kHalf, words, Groups * kGroup, out, run[i].v_ahead);
      }
    }
  }
};

// Scores of the keys low .. high, and of others in their parts.
void score_few_rows(const FewRows& f, const uint8_t* queries, int low, int high, uint8_t* scores) {
  const int steps = round_up(f.head_dim, kStep<kFp8>) / kStep<kFp8>;
  const int first = low / kPartKeys, last = (high + kPartKeys - 1) / kPartKeys;
  PendingSums pending;
  int pieces = 0;
  const auto score_part = [&](auto set, int part) {
    constexpr int kSet = decltype(set)::value, kSum = kSetSums * kSet;
    tile_zero<kSum>();
    tile_zero<kSum + 1>();
    for (int step = 0; step < steps; ++step, ++pieces) {
      if (step + 1 < steps) {
        f.convert_keys(part, step + 1, f.piece(pieces + 1));
      } else if (part + 1 < last) {
        f.convert_keys(part + 1, 0, f.piece(pieces + 1));
      }
      load_left<kFp8>(queries + step * kPlaneBytes, kTileBytes, 0);
      add_group<kFp8, Product::kBf16, kSet, 0>(f.piece(pieces), kPartKeys * 4);
      add_group<kFp8, Product::kBf16, kSet, 1>(f.piece(pieces) + kTileBytes, kPartKeys * 4);
    }
    store_sums<1 - kSet>(pending);
    pending = {scores + part * 2 * kTileBytes, kScoreStride<kFp8>, 2, kSet};
  };
  f.convert_keys(first, 0, f.piece(0));
  for (int part = first; part < last; ++part) {
    if ((part - first) % 2 == 0) {
      score_part(std::integral_constant<int, 0>(), part);
    } else {
      score_part(std::integral_constant<int, 1>(), part);
    }
  }
  pending.set == 0 ? store_sums<0>(pending) : store_sums<1>(pending);
}

template <int I>
CASTLINE_INLINE void add_value_group(const uint8_t* right, ptrdiff_t stride) {
  tile_load<kRight + I % 2>(right, stride);
  tile_product<Product::kBf16, I, kLeft, kRight + I % 2>();
}

// Converts the piece of V that sum_few_rows begins with: a head of 32 or more has two groups.
void begin_values(const FewRows& f, int low) { f.convert_values<2>(low / kPartKeys, 0, f.piece(0)); }

// P.V of Groups groups of dimensions over the steps first .. last.
template <int Groups>
void sum_groups(const FewRows& f, const uint8_t* weights, int group, int first, int last, uint8_t* products) {
  tile_zero<0>();
  if constexpr (Groups > 1) tile_zero<1>();
  if constexpr (Groups > 2) tile_zero<2>();
  if constexpr (Groups > 3) tile_zero<3>();
  constexpr int kPieces = (Groups + 1) / 2;  // of a step
  constexpr int kFirst = Groups > 1 ? 2 : 1, kSecond = Groups > 3 ? 2 : 1;  // groups of a piece
  if (group > 0) f.convert_values<kFirst>(first, group, f.piece(0));
  for (int s = first; s < last; ++s) {
    const int i = (s - first) * kPieces;
    if constexpr (kPieces == 2) {
      f.convert_values<kSecond>(s, group + 2, f.piece(i + 1));
    } else if (s + 1 < last) {
      f.convert_values<kFirst>(s + 1, group, f.piece(i + 1));
    }
    load_left<kFp8>(weights + s * kTileBytes, kWeightStride<kFp8>, 0);
    add_value_group<0>(f.piece(i), kFirst * kTileBytes);
    if constexpr (Groups > 1) add_value_group<1>(f.piece(i) + kTileBytes, kFirst * kTileBytes);
    if constexpr (kPieces == 2) {
      if (s + 1 < last) f.convert_values<kFirst>(s + 1, group, f.piece(i + 2));
      add_value_group<2>(f.piece(i + 1), kSecond * kTileBytes);
      if constexpr (Groups > 3) add_value_group<3>(f.piece(i + 1) + kTileBytes, kSecond * kTileBytes);
    }
  }
  products += group * kTileBytes;
  const ptrdiff_t row = product_stride<kFp8>(f.head_dim);
  tile_store<0>(products, row);
  if constexpr (Groups > 1) tile_store<1>(products + kTileBytes, row);
  if constexpr (Groups > 2) tile_store<2>(products + 2 * kTileBytes, row);
  if constexpr (Groups > 3) tile_store<3>(products + 3 * kTileBytes, row);
}

// P.V over the keys low .. high, after begin_values.
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
