// AMX tile registers: eight, of up to 16 rows of 64 bytes. Included by kernel_amx.cpp's headers only.
//
// Written in assembly because the intrinsics of GCC 12 do not say that a load reads memory: stores of what is loaded
// may then be moved past it, or dropped.
#pragma once

#include <immintrin.h>
#include <stddef.h>

#include "simd.h"

namespace castline::CASTLINE_ISA {
namespace {

// Registers by use: sums 0 .. 3, left operands 4 and 5, right operands 6 and 7.
constexpr int kLeft = 4, kRight = 6;
constexpr int kTileBytes = 64;
constexpr int kDepth = 16;

template <int Register>
CASTLINE_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Register));
}
template <int Register>
CASTLINE_INLINE void tile_load(const void* base, ptrdiff_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(base), "r"(stride), "i"(Register) : "memory");
}
template <int Register>
CASTLINE_INLINE void tile_store(void* base, ptrdiff_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(base), "r"(stride), "i"(Register) : "memory");
}

// sum += left * right: bf16 pairs into fp32; signed, or unsigned by signed, byte quads into int32.
enum class Product { kBf16, kSigned, kUnsignedSigned };

template <Product P, int Sum, int Left, int Right>
CASTLINE_INLINE void tile_product() {
  if constexpr (P == Product::kBf16) {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(Left), "i"(Right));
  } else if constexpr (P == Product::kSigned) {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(Left), "i"(Right));
  } else {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(Left), "i"(Right));
  }
}

// The registers' shapes: sums and left operands of *rows* rows, operands of kDepth words in the summed direction. The
// thread may have run, and may go on to run, another library's kernels with shapes of their own: shapes are set at the
// start of every item and dropped at its end.
class TileShapes {
 public:
  explicit TileShapes(int rows) {
    config_.palette = 1;
    for (int t = 0; t < 8; ++t) {
      config_.rows[t] = static_cast<uint8_t>(t < kRight ? rows : kDepth);
      config_.row_bytes[t] = kTileBytes;
    }
    asm volatile("ldtilecfg %0" : : "m"(config_));
  }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;
  ~TileShapes() { asm volatile("tilerelease" : :); }

 private:
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config_ = {};
};

}  // namespace
}  // namespace castline::CASTLINE_ISA
