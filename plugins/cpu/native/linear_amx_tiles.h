// Tile registers, and how the wide kernels block rows. Included by linear_amx.cpp only.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "linear.h"
#include "simd.h"

namespace castline::CASTLINE_ISA {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 1024;
constexpr int kTileFloats = kTileBytes / 4;
constexpr int kTileStride = kTileBytes / kTileRows;

// Tiles by number: sums 0 .. 3, first operands (activations) 4 and 5, second operands (weights) 6 and 7. Eight tiles
// hold two by two sums, which is the least reading for a multiplication: one load each.
//
// The tile instructions are written in assembly because GCC's intrinsics do not tell the compiler which memory they
// read and write.
typedef uint8_t TileMemory[kTileBytes];

template <int Tile>
CASTLINE_INLINE void load_tile(const void* from) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
               :
               : "r"(from), "r"(ptrdiff_t{kTileStride}), "n"(Tile), "m"(*static_cast<const TileMemory*>(from)));
}
// The same for what will not be read again soon: it leaves the first-level cache to the panel of weights.
template <int Tile>
CASTLINE_INLINE void stream_tile(const void* from) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2"
               :
               : "r"(from), "r"(ptrdiff_t{kTileStride}), "n"(Tile), "m"(*static_cast<const TileMemory*>(from)));
}
template <int Tile>
CASTLINE_INLINE void store_tile(void* to) {
  asm volatile("tilestored %%tmm%c3, (%1,%2,1)"
               : "=m"(*static_cast<TileMemory*>(to))
               : "r"(to), "r"(ptrdiff_t{kTileStride}), "n"(Tile));
}
template <int Tile>
CASTLINE_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "n"(Tile));
}
template <int Sum, int A, int B>
CASTLINE_INLINE void add_product_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(Sum), "n"(A), "n"(B));
}
// Signed bytes of A by unsigned bytes of B.
template <int Sum, int A, int B>
CASTLINE_INLINE void add_product_int8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(Sum), "n"(A), "n"(B));
}

// Holds the thread's tile configuration: full tiles, or for a step of fewer than 16 rows tiles of that many. The
// configuration is state of the thread, which others in this process (ONNX Runtime's own kernels) configure for
// themselves: it is loaded for each call and released after it.
class TileScope {
 public:
  explicit TileScope(int64_t rows) {
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = kTileStride;
      config.rows[tile] = static_cast<uint8_t>(tile < 6 && rows < kTileRows ? rows : kTileRows);
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~TileScope() { asm volatile("tilerelease"); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

static inline int64_t row_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }

constexpr int64_t kBlockTiles = 32;

// Row tiles that are taken through all strips before the next: their prepared bytes stay in the second-level cache.
static inline int64_t block_tiles(int64_t bytes_per_tile) {
  constexpr int64_t kBlockBytes = 768 << 10;
  const int64_t tiles = kBlockBytes / bytes_per_tile / 2 * 2;
  return tiles < 2 ? 2 : tiles > kBlockTiles ? kBlockTiles : tiles;
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
