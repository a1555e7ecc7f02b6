// Values: the weighted sum of V over the keys of one key tile, lanes = dimensions. Included by kernel.h only.
//
// Every output element adds up in the order of keys. Keys outside [first_key, last_key) are never used: a slot that was
// never written may hold anything.
#pragma once

#include <stddef.h>

#include "scores.h"

namespace castline::CASTLINE_ISA {
namespace {

// K and V are fetched some blocks before they are read: no processor foresees in which block keys go on. Far enough for
// the memory to answer, near enough for the first level of the cache to keep it.
constexpr int kMostAhead = 4, kBytesAhead = 8192;

// The blocks of one key tile, of which the keys first_key .. last_key (counted from the tile's start) are used.
struct TileBlocks {
  HeadBlock block[kKeyTile / 16];
  int block_size, first_key, last_key;
  int ahead;                        // blocks, 1 .. kMostAhead
  const uint8_t* next[kMostAhead];  // K of the blocks after the tile's, [ahead], or any address

  // How far what is read *ahead* blocks after K, or V, of block b is from it.
  ptrdiff_t ahead_of_k(int b) const { return read_as(b - first_block() + ahead) - block[b].k; }
  ptrdiff_t ahead_of_v(int b) const { return read_as(b - first_block() + blocks() + ahead) - block[b].v; }

 private:
  // block_size divides kKeyTile: shifts, which take a tenth of a division's time.
  int block_of(int key) const { return key >> __builtin_ctz(block_size); }
  int first_block() const { return block_of(first_key); }
  int blocks() const { return block_of(last_key - 1) + 1 - first_block(); }
  // What is read as the i-th: K of all blocks, then V of all, then the next tile.
  const uint8_t* read_as(int i) const {
    const int n = blocks();
    return i < n ? block[first_block() + i].k : i < 2 * n ? block[first_block() + i - n].v : next[i - 2 * n];
  }
};

// Sums of Rows rows by Vectors * kLanes dimensions, in registers over a run of keys.
template <KvDtype T, int Rows, int Vectors>
struct Accumulator {
  Vec sum[Rows][Vectors];

  CASTLINE_INLINE void multiply_add(const Vec (*values)[side_by_side(T)], int i, const float* weight) {
    #pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Vec w = broadcast(weight[r * kKeyTile]);
      #pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[r][v] = fma(values[v][i], w, sum[r][v]);
    }
  }

  // Keys first .. last of one block; *values* is where the block's first key is, weight[r * kKeyTile + i] key i's
  // weight.
  CASTLINE_INLINE void add_block(const uint8_t* values, ptrdiff_t head_dim, int first, int last, ptrdiff_t ahead,
                                 const float* weight) {
    constexpr int kBeside = side_by_side(T);
    values += first / kBeside * head_dim * kLoadBytes<T>;
    for (int key = first / kBeside * kBeside; key < last; key += kBeside, values += head_dim * kLoadBytes<T>) {
      Vec x[Vectors][kBeside];
      load_vectors<T, Vectors>(values, x);
      fetch_ahead<Vectors * kLanes * kLoadBytes<T>>(values + ahead);
      #pragma GCC unroll 8
      for (int i = 0; i < kBeside; ++i) {
        if (key + i >= first && key + i < last) multiply_add(x, i, weight + key + i);
      }
    }
  }
};

// Adds to out[r][dim .. dim + Vectors * kLanes] for Rows rows over the tile's keys.
template <KvDtype T, int Rows, int Vectors>
CASTLINE_LOOP void value_tile(const TileBlocks& tile, int head_dim, int dim, const float* weights, float* out) {
  Accumulator<T, Rows, Vectors> accumulator;
  #pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    #pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) accumulator.sum[r][v] = load(out + r * head_dim + dim + v * kLanes);
  }
  const int n = tile.block_size, offset = dim * kLoadBytes<T>;
  for (int b = tile.first_key / n; b * n < tile.last_key; ++b) {
    const int first = tile.first_key > b * n ? tile.first_key - b * n : 0;
    const int last = tile.last_key < (b + 1) * n ? tile.last_key - b * n : n;
    accumulator.add_block(tile.block[b].v + offset, head_dim, first, last, tile.ahead_of_v(b), weights + b * n);
  }
  #pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    #pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) store(out + r * head_dim + dim + v * kLanes, accumulator.sum[r][v]);
  }
}

// Adds the last vector of a head_dim that is no multiple of kLanes. It begins at head_dim - kLanes, so that no load
// passes the end of a row; the sums it has in common with the vector before are put back.
template <KvDtype T, int Rows>
void value_tail(const TileBlocks& tile, int head_dim, const float* weights, float* out) {
  const int dim = head_dim - kLanes, common = kLanes - head_dim % kLanes;
  float kept[Rows * kLanes];
  #pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) memcpy(kept + r * kLanes, out + r * head_dim + dim, sizeof(float) * common);
  value_tile<T, Rows, 1>(tile, head_dim, dim, weights, out);
  #pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) memcpy(out + r * head_dim + dim, kept + r * kLanes, sizeof(float) * common);
}

template <KvDtype T, int Rows>
void value_rows(const TileBlocks& tile, int head_dim, const float* weights, float* out) {
  constexpr int kWide = kLanes == 16 ? 4 : 2;
  int dim = 0;
  for (; dim + kWide * kLanes <= head_dim; dim += kWide * kLanes) {
    value_tile<T, Rows, kWide>(tile, head_dim, dim, weights, out);
  }
  for (; dim + kLanes <= head_dim; dim += kLanes) value_tile<T, Rows, 1>(tile, head_dim, dim, weights, out);
  if (dim < head_dim) value_tail<T, Rows>(tile, head_dim, weights, out);
}

// out[rows][head_dim] += weights[rows][keys] * V over the tile's keys.
template <KvDtype T>
void add_values(const TileBlocks& tile, int rows, int head_dim, const float* weights, float* out) {
  for (int first = 0; first < rows; first += kRowTile) {
    const float* w = weights + first * kKeyTile;
    float* o = out + first * head_dim;
    switch (tile_rows(rows, first)) {
      case 6: if constexpr (kRowTile >= 6) value_rows<T, 6>(tile, head_dim, w, o); break;
      case 5: if constexpr (kRowTile >= 5) value_rows<T, 5>(tile, head_dim, w, o); break;
      case 4: value_rows<T, 4>(tile, head_dim, w, o); break;
      case 3: value_rows<T, 3>(tile, head_dim, w, o); break;
      case 2: value_rows<T, 2>(tile, head_dim, w, o); break;
      default: value_rows<T, 1>(tile, head_dim, w, o); break;
    }
  }
}

// As add_values, each block decoded once into *floats* [block_size][head_dim]: for items whose rows use it repeatedly.
template <KvDtype T>
void add_decoded_values(const TileBlocks& tile, int rows, int head_dim, const float* weights, float* floats,
                        float* out) {
  const int n = tile.block_size;
  for (int b = tile.first_key / n; b * n < tile.last_key; ++b) {
    decode_block<T>(tile.block[b].v, n, head_dim, floats);
    TileBlocks one = tile;
    one.block[b].v = reinterpret_cast<uint8_t*>(floats);
    one.ahead = 1;
    one.next[0] = one.block[b].v;  // nothing to fetch
    one.first_key = tile.first_key > b * n ? tile.first_key : b * n;
    one.last_key = tile.last_key < (b + 1) * n ? tile.last_key : (b + 1) * n;
    add_values<kFp32>(one, rows, head_dim, weights, out);
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
