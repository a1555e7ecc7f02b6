// Vec in the compiler's own vector types: four lanes, which every baseline with SIMD has as one register. Included by
// simd.h only.
#pragma once

namespace castline::CASTLINE_ISA {
namespace {

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t Int __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kRowTile = 4;
constexpr float kFp8Scale = 1.0f;

CASTLINE_INLINE Vec broadcast(float x) { return Vec{x, x, x, x}; }
CASTLINE_INLINE Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, 16);
  return v;
}
CASTLINE_INLINE void store(float* p, Vec v) { memcpy(p, &v, 16); }
CASTLINE_INLINE Vec add(Vec a, Vec b) { return a + b; }
CASTLINE_INLINE Vec mul(Vec a, Vec b) { return a * b; }
CASTLINE_INLINE Vec div(Vec a, Vec b) { return a / b; }
CASTLINE_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
CASTLINE_INLINE Vec fma(Vec a, Vec b, Vec c) {
#ifdef __FP_FAST_FMAF
  Vec out;
  for (int i = 0; i < kLanes; ++i) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return out;
#else
  return a * b + c;
#endif
}
CASTLINE_INLINE float reduce_add(Vec v) { return (v[0] + v[1]) + (v[2] + v[3]); }
CASTLINE_INLINE float reduce_max(Vec v) {
  const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}
CASTLINE_INLINE Vec keep_range(Vec x, int lo, int hi, Vec other) {
  const Int lane = {0, 1, 2, 3};
  return (lane >= lo) & (lane < hi) ? x : other;
}
CASTLINE_INLINE Vec keep_above(Vec x, Vec y, float bound, Vec other) { return y > broadcast(bound) ? x : other; }
CASTLINE_INLINE Int load_words(const uint8_t* p) {
  Int v;
  memcpy(&v, p, 16);
  return v;
}
template <int N>
CASTLINE_INLINE Int shift_left(Int v) {
  typedef uint32_t Unsigned __attribute__((vector_size(16)));
  return reinterpret_cast<Int>(reinterpret_cast<Unsigned>(v) << N);
}
template <int N>
CASTLINE_INLINE Int shift_right(Int v) {
  return v >> N;
}
CASTLINE_INLINE Int high_half(Int v) { return v & static_cast<int32_t>(0xffff0000); }
CASTLINE_INLINE Vec as_float(Int v) { return reinterpret_cast<Vec>(v); }
CASTLINE_INLINE Vec to_float(Int v) { return __builtin_convertvector(v, Vec); }
// Of v above -2^22; below, what scale_exp2 makes of it is 0 all the same.
CASTLINE_INLINE Vec floor(Vec v) {
  const Vec nearest = (v + broadcast(12582912.0f)) - broadcast(12582912.0f);
  return nearest > v ? nearest - broadcast(1.0f) : nearest;
}
CASTLINE_INLINE Vec fraction(Vec v) { return v - floor(v); }
CASTLINE_INLINE Vec scale_exp2(Vec p, Vec x) {
  const Int exponent = __builtin_convertvector(floor(max(x, broadcast(kLeastExponent))), Int);
  return keep_above(p * as_float(shift_left<23>(exponent + 127)), x, kLeastExponent, broadcast(0.0f));
}

struct Fp8Table {
  float value[256];
  constexpr Fp8Table() : value{} {
    for (int code = 0; code < 256; ++code) {
      const int exponent = (code >> 3) & 15, mantissa = code & 7;
      float x = exponent == 0 ? mantissa / 8.0f : 1.0f + mantissa / 8.0f;
      for (int e = exponent == 0 ? 1 : exponent; e < 7; ++e) x /= 2;
      for (int e = exponent; e > 7; --e) x *= 2;
      value[code] = code & 128 ? -x : x;
    }
  }
};
constexpr Fp8Table kFp8Table;

CASTLINE_INLINE void load_fp8_pair(const uint8_t* p, Vec& even, Vec& odd) {
  const float* table = kFp8Table.value;
  even = Vec{table[p[0]], table[p[2]], table[p[4]], table[p[6]]};
  odd = Vec{table[p[1]], table[p[3]], table[p[5]], table[p[7]]};
}

CASTLINE_INLINE Vec sub(Vec a, Vec b) { return a - b; }
CASTLINE_INLINE Vec load_half(const uint16_t* p) {
  return Vec{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
CASTLINE_INLINE Vec load_first(const float* p, int n) {
  Vec v = {};
  for (int i = 0; i < n && i < kLanes; ++i) v[i] = p[i];
  return v;
}
CASTLINE_INLINE void store_first(float* p, int n, Vec v) {
  for (int i = 0; i < n && i < kLanes; ++i) p[i] = v[i];
}
CASTLINE_INLINE Int magnitude(Vec v) { return reinterpret_cast<Int>(v) & 0x7fffffff; }
CASTLINE_INLINE Int max_int(Int a, Int b) { return a > b ? a : b; }
CASTLINE_INLINE int32_t reduce_max_int(Int v) {
  const int32_t a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}
CASTLINE_INLINE int32_t store_rounded(int8_t* p, Vec v) {
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) {
    const int32_t rounded = round_to_int(v[i]);
    p[i] = static_cast<int8_t>(rounded);
    sum += rounded;
  }
  return sum;
}
CASTLINE_INLINE double sum_of_squares(const float* x, int count) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += static_cast<double>(x[i]) * x[i];
  return sum;
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
