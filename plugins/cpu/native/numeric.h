// Conversions between number formats; K and V round to the pool's dtypes exactly as in castline.plugins.reference.
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

// Greatest |x|, taken as integers, whose order is that of the magnitudes and whose maximum vectorises. A NaN wins.
static inline float largest_magnitude(const float* x, int count) {
  uint32_t largest = 0;
  for (int i = 0; i < count; ++i) {
    const uint32_t magnitude = float_bits(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return bits_float(largest);
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

// e4m3fn: nearest, ties to even, saturating at 448; a NaN becomes the format's NaN. Every case is computed and one
// chosen, so that a loop of it vectorises.
static inline uint8_t to_fp8(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t small = static_cast<uint32_t>(round_to_int(bits_float(magnitude) * 512.0f));  // multiples of 2^-9
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  uint32_t code = magnitude < 0x3c800000u ? small : normal;  // 2^-6
  code = magnitude >= 0x43e00000u ? 0x7eu : code;            // 448
  code = magnitude > 0x7f800000u ? 0x7fu : code;
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | code);
}

// fp16 as a float: its bits in float's place are the value divided by 2^112, subnormals too.
static inline float half_to_float(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  const float x = magnitude >= 0x0f800000u ? bits_float(magnitude | 0x7f800000u) : bits_float(magnitude) * 0x1p112f;
  return half & 0x8000 ? -x : x;
}

static inline int8_t to_int8(float x, float scale) {
  int32_t q = round_to_int(x / scale);
  q = q > 127 ? 127 : q;
  q = q < -127 ? -127 : q;
  return static_cast<int8_t>(scale > 0.0f ? q : 0);
}

}  // namespace castline
