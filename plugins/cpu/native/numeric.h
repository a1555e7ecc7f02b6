// Rounding of K and V to the pool's dtypes, exactly as castline.plugins.reference rounds.
#pragma once

#include <cstdint>
#include <cstring>

namespace castline {

static inline uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static inline float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves the integer in the low mantissa bits.
static inline int32_t round_to_int(float x) {
  return static_cast<int32_t>(float_bits(x + 12582912.0f) - float_bits(12582912.0f));
}

static inline uint16_t to_bf16(float x) {
  const uint32_t bits = float_bits(x);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return is_nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// e4m3fn: nearest, ties to even, saturating at 448; a NaN becomes the format's NaN.
static inline uint8_t to_fp8(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 24) & 0x80u;
  uint32_t code;
  if (magnitude > 0x7f800000u) {
    code = 0x7f;
  } else if (magnitude >= 0x43e00000u) {  // 448
    code = 0x7e;
  } else if (magnitude < 0x3c800000u) {  // below 2^-6: multiples of 2^-9
    code = static_cast<uint32_t>(round_to_int(bits_float(magnitude) * 512.0f));
  } else {
    code = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  }
  return static_cast<uint8_t>(sign | code);
}

static inline int8_t to_int8(float x, float scale) {
  const int32_t q = scale > 0.0f ? round_to_int(x / scale) : 0;
  return static_cast<int8_t>(q > 127 ? 127 : q < -127 ? -127 : q);
}

}  // namespace castline
