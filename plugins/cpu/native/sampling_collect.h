// Which lanes lie in a range, written side by side. Included by sampling_kernel.h only.
#pragma once

#include <stdint.h>

#include "simd.h"

namespace castline::CASTLINE_ISA {
namespace {

// Writes first + i of each lane i of x with low <= x < high to *ids*, ascending; returns how many. May write kLanes ids.
#if defined(CASTLINE_ISA_AVX512)
CASTLINE_INLINE int collect_lanes(Vec x, float low, float high, int32_t first, int32_t* ids) {
  const __mmask16 from_low = _mm512_cmp_ps_mask(x, broadcast(low), _CMP_GE_OQ);
  const __mmask16 chosen = _mm512_mask_cmp_ps_mask(from_low, x, broadcast(high), _CMP_LT_OQ);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  // Packed in a register: storing packed is slow on some processors.
  _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(chosen, _mm512_add_epi32(lanes, _mm512_set1_epi32(first))));
  return __builtin_popcount(chosen);
}
#elif defined(CASTLINE_ISA_AVX2)
CASTLINE_INLINE int collect_lanes(Vec x, float low, float high, int32_t first, int32_t* ids) {
  const Vec chosen = _mm256_and_ps(_mm256_cmp_ps(x, broadcast(low), _CMP_GE_OQ),
                                   _mm256_cmp_ps(x, broadcast(high), _CMP_LT_OQ));
  int count = 0;
  for (unsigned lanes = _mm256_movemask_ps(chosen); lanes != 0; lanes &= lanes - 1) {
    ids[count++] = first + __builtin_ctz(lanes);
  }
  return count;
}
#else
CASTLINE_INLINE int collect_lanes(Vec x, float low, float high, int32_t first, int32_t* ids) {
  int count = 0;
  for (int i = 0; i < kLanes; ++i) {
    ids[count] = first + i;
    count += (x[i] >= low) & (x[i] < high);  // no branch: what is not taken is overwritten
  }
  return count;
}
#endif

}  // namespace
}  // namespace castline::CASTLINE_ISA
