// Products of one strip of rows with a key tile, in pieces, and the memory they are stored in. Included by
// tile_attend.h only.
#pragma once

#include "tile_operands.h"

namespace castline::CASTLINE_ISA {
namespace {

// Strides are no multiple of 1024 bytes: the rows of a strip would share few sets of the cache.
template <KvDtype T>
constexpr int kScoreStride = kKeyTile * 4 * kSumPlanes<T> + 64;  // [group][plane][kGroup], 32 bits each
template <KvDtype T>
constexpr int kWeightStride = kKeyTile / kStep<T> * kPlanes<T> * kTileBytes + 64;  // [step][plane][kTileBytes]

template <KvDtype T>
constexpr int product_stride(int head_dim) {
  return round_up(head_dim, kGroup) * 4 * kSumPlanes<T> + 64;
}

// Sums are taken in pieces of two registers, and two sets of them take turns: the matrix unit works in order, so a
// piece's sums are stored after the products of the next piece, when they are ready.
constexpr int kSetSums = 2;

// Groups of one piece: of keys in q.k, of dimensions in P.V.
template <KvDtype T>
constexpr int kPieceGroups = kSetSums / kSumPlanes<T>;

// Sums that are still to be stored: *count* registers of set *set*, side by side at *out*.
struct PendingSums {
  uint8_t* out = nullptr;
  ptrdiff_t stride = 0;
  int count = 0, set = 1;
};

template <int Set>
CASTLINE_INLINE void store_sums(const PendingSums& pending) {
  if (pending.count > 0) tile_store<kSetSums * Set>(pending.out, pending.stride);
  if (pending.count > 1) tile_store<kSetSums * Set + 1>(pending.out + kTileBytes, pending.stride);
}

// Loads the right operand of group I of the piece and adds its products with the left planes.
template <KvDtype T, Product P, int Set, int I>
CASTLINE_INLINE void add_group(const uint8_t* right, ptrdiff_t stride) {
  constexpr int kSum = kSetSums * Set + I * kSumPlanes<T>;
  tile_load<kRight + I>(right, stride);
  tile_product<P, kSum, kLeft, kRight + I>();
  if constexpr (kPlanes<T> == 2) tile_product<P, kSum + kSumPlanes<T> - 1, kLeft + 1, kRight + I>();
}

template <KvDtype T>
CASTLINE_INLINE void load_left(const uint8_t* left, ptrdiff_t stride, ptrdiff_t plane_bytes) {
  tile_load<kLeft>(left, stride);
  if constexpr (kPlanes<T> == 2) tile_load<kLeft + 1>(left + plane_bytes, stride);
}

// Products of a piece of q.k: the keys of its groups, of which the first is g.
template <KvDtype T, int Set>
void score_piece(const uint8_t* queries, int steps, const RightOperands& right, int g) {
  constexpr Product kProduct = T == kInt8 ? Product::kSigned : Product::kBf16;
  tile_zero<kSetSums * Set>();
  tile_zero<kSetSums * Set + 1>();
  for (int s = 0; s < steps; ++s, queries += kPlanes<T> * kPlaneBytes) {
    const ptrdiff_t at = s * kDepth * right.k_stride;
    load_left<T>(queries, kTileBytes, kPlaneBytes);
    add_group<T, kProduct, Set, 0>(right.k[g] + at, right.k_stride);
    if constexpr (kPieceGroups<T> > 1) add_group<T, kProduct, Set, 1>(right.k[g + 1] + at, right.k_stride);
  }
}

// Products of a piece of P.V over the steps first .. last of the keys; *offset* is where its dimensions begin.
template <KvDtype T, int Set>
void value_piece(const uint8_t* weights, const RightOperands& right, ptrdiff_t offset, bool all_groups, int first,
                 int last) {
  constexpr Product kProduct = T == kInt8 ? Product::kUnsignedSigned : Product::kBf16;
  tile_zero<kSetSums * Set>();
  tile_zero<kSetSums * Set + 1>();
  for (int s = first; s < last; ++s) {
    load_left<T>(weights + s * kPlanes<T> * kTileBytes, kWeightStride<T>, kTileBytes);
    add_group<T, kProduct, Set, 0>(right.v[s] + offset, right.v_stride);
    if constexpr (kPieceGroups<T> > 1) {
      if (all_groups) add_group<T, kProduct, Set, 1>(right.v[s] + offset + kTileBytes, right.v_stride);
    }
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
