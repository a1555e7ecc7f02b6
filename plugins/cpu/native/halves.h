// fp8 elements as halves, for items of few rows. Included by kernel.h only.
//
// Two instructions make halves of 32 elements, and one that reads them from memory makes floats of 16: less than half
// of what floats cost straight from the bytes, for which halves must be spread over a register.
#pragma once

#include "scores.h"

namespace castline::CASTLINE_ISA {
namespace {

// Rows of *columns* words of two elements side by side, *stride* words apart, as rows of halves [2 * rows][columns]
// divided by kFp8Scale (see load_fp8_pair): of each row of words the even elements, then the odd ones.
void decode_halves(const uint8_t* words, ptrdiff_t stride, int rows, int columns, uint16_t* out) {
  const Int kept = _mm512_set1_epi16(static_cast<int16_t>(0xbf80));
  for (int row = 0; row < rows; ++row, words += 2 * stride, out += 2 * columns) {
    for (int c = 0; c < columns; c += 2 * kLanes) {
      const int left = columns - c;
      const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1u;
      const Int pairs = _mm512_maskz_loadu_epi16(mask, words + 2 * c);
      const Int even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(pairs, 8), 1), kept);
      const Int odd = _mm512_and_si512(_mm512_srai_epi16(pairs, 1), kept);
      _mm512_mask_storeu_epi16(out + c, mask, even);
      _mm512_mask_storeu_epi16(out + columns + c, mask, odd);
    }
  }
}

template <>
void decode_block<kFp8, kHalf>(const uint8_t* tile, int rows, int columns, uint8_t* decoded) {
  decode_halves(tile, columns, rows / 2, columns, reinterpret_cast<uint16_t*>(decoded));
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
