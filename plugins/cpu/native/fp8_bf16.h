// fp8 elements as bf16, for matrix instructions. Included by kernel_amx.cpp only.
//
// A byte of a bf16 is an affine function, over bits, of an e4m3 code: 2^-7 and more need no more than their bits moved.
// What is smaller does: {0, 1, 2, 3} * 2^-9, of either sign, has binades of its own. Four codes of either sign go through
// the other affine instruction, which inverts first (in GF(2^8), with x^8 + x^4 + x^3 + x + 1) and so takes any eight
// bytes that do not depend on each other to any eight others. The pool holds codes (pool_code) that are cheap to tell
// apart and whose inverses do not depend on each other. The matrices were found by elimination; the tests go through
// every code.
#pragma once

#include <immintrin.h>

#include "simd.h"

namespace castline::CASTLINE_ISA {
namespace {

// A bf16 of an fp8 operand is the element times 2^-104, and an operand on the left makes up for it. A query only in
// part, so that no query overflows: its scores are to be multiplied by what is missing.
constexpr float kFp8Query = 0x1p64f, kFp8Score = 0x1p40f, kFp8Weight = 0x1p104f;

// What the pool holds of an e4m3 code: the lowest bit is inverted; but of the eight codes of either sign below 2^-6,
// which have the exponent 0, those below 2^-7 are the even ones, and the others the odd ones.
static inline uint8_t pool_code(uint8_t code) {
  const unsigned high = code >> 2 & 1u, middle = code >> 1 & 1u, low = code & 1u;
  const unsigned small = (code & 0x80u) | (high ? middle << 2 | low << 1 | 1u : low << 2 | (low ^ middle) << 1);
  return static_cast<uint8_t>((code & 0x78u) == 0 ? small : code ^ 1u);
}

struct Bf16Halves {
  Int first, second;
};

// Sixty-four elements as bf16, in order. Zeros come as subnormals, which matrix instructions take for 0. The constants
// are kept in registers: as operands in memory they take the conversion a sixth longer.
class Bf16OfFp8 {
 public:
  CASTLINE_INLINE Bf16OfFp8() { asm("" : "+v"(order_), "+v"(high_), "+v"(low_), "+v"(small_high_), "+v"(small_low_)); }

  CASTLINE_INLINE Bf16Halves operator()(Int codes) const {
    const Int x = _mm512_permutexvar_epi64(order_, codes);
    const __mmask64 is_small = _mm512_testn_epi8_mask(x, _mm512_set1_epi8(0x79));
    Int high = _mm512_gf2p8affine_epi64_epi8(x, high_, 0x08), low = _mm512_gf2p8affine_epi64_epi8(x, low_, 0x10);
    high = _mm512_mask_gf2p8affineinv_epi64_epi8(high, is_small, x, small_high_, 0x00);
    low = _mm512_mask_gf2p8affineinv_epi64_epi8(low, is_small, x, small_low_, 0x40);
    return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
  }

 private:
  Int order_ = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // interleaving goes by lanes of 128 bits
  Int high_ = _mm512_set1_epi64(0x1020400000000080), low_ = _mm512_set1_epi64(0x0000000001020408);
  Int small_high_ = _mm512_set1_epi64(0x38383800000000d4), small_low_ = _mm512_set1_epi64(0x000000000000f064);
};

CASTLINE_INLINE __mmask32 words_below(int n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1u; }

}  // namespace
}  // namespace castline::CASTLINE_ISA
