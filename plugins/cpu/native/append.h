// Append: QK-norm, RoPE, quantise and write K and V of one token. Included by kernel.h only.
//
// The arithmetic is that of castline.plugins.reference to the last bit (no fused multiply-add, the norm's sum in
// double), so that the quantised K and V are equal and not merely close.
#pragma once

#include <stddef.h>

#include "layout.h"
#include "numeric.h"
#ifdef CASTLINE_FP8_BF16
#include "fp8_bf16.h"
#endif

namespace castline::CASTLINE_ISA {
namespace {

#ifndef CASTLINE_FP8_BF16
// The pool holds e4m3's own codes.
static inline uint8_t pool_code(uint8_t code) { return code; }
#endif

float rms_inverse(const float* x, float eps, int count) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += static_cast<double>(x[i]) * x[i];
  return static_cast<float>(1.0 / __builtin_sqrt(sum / count + eps));
}

void rotate(const Attributes& a, const float* cos, const float* sin, float* x) {
  const int half = a.rotary_dim / 2;
  if (a.rope_interleaved) {
    for (int i = 0; i < half; ++i) {
      const float even = x[2 * i], odd = x[2 * i + 1];
      x[2 * i] = even * cos[i] - odd * sin[i];
      x[2 * i + 1] = odd * cos[i] + even * sin[i];
    }
  } else {
    for (int i = 0; i < half; ++i) {
      const float low = x[i], high = x[i + half];
      x[i] = low * cos[i] - high * sin[i];
      x[i + half] = high * cos[i] + low * sin[i];
    }
  }
}

// Norm (if any) and RoPE (if any) of head *h* of x, into out [head_dim]. full_inverse is the factor of QkNorm FULL.
void prepare_head(const Attributes& a, const float* x, const float* weight, int h, float full_inverse,
                  const float* cos, const float* sin, float* out) {
  const int dim = a.head_dim;
  x += h * dim;
  if (a.qk_norm == kNoNorm) {
    memcpy(out, x, sizeof(float) * dim);
  } else {
    const bool full = a.qk_norm == kNormFull;
    const float inverse = full ? full_inverse : rms_inverse(x, a.norm_eps, dim);
    const float* w = full ? weight + h * dim : weight;
    for (int d = 0; d < dim; ++d) out[d] = x[d] * inverse * w[d];
  }
  rotate(a, cos, sin, out);
}

// Quantises one head: *out* is a contiguous buffer of the dtype's elements.
template <KvDtype T>
void quantise(const float* x, int dim, uint8_t* out, float scale) {
  for (int d = 0; d < dim; ++d) {
    if constexpr (T == kFp32) reinterpret_cast<float*>(out)[d] = x[d];
    if constexpr (T == kBf16) reinterpret_cast<uint16_t*>(out)[d] = to_bf16(x[d]);
    if constexpr (T == kInt8) out[d] = static_cast<uint8_t>(to_int8(x[d], scale));
    if constexpr (T == kFp8) out[d] = pool_code(to_fp8(x[d]));
  }
}

// Copies element [i] of *from* to element [i * stride] of *to*, elements of type Word.
template <class Word>
void scatter(const uint8_t* from, int count, uint8_t* to, ptrdiff_t stride) {
  for (int i = 0; i < count; ++i) memcpy(to + i * stride * sizeof(Word), from + i * sizeof(Word), sizeof(Word));
}

// Writes K and V of one token and head at *offset* of the block (layout.h).
template <KvDtype T>
void write_head(const Attributes& a, const HeadBlock& block, int offset, const float* k, const float* v) {
  const int n = a.block_size, dim = a.head_dim;
  const float k_scale = T == kInt8 ? largest_magnitude(k, dim) / 127.0f : 0.0f;
  const float v_scale = T == kInt8 ? largest_magnitude(v, dim) / 127.0f : 0.0f;
  alignas(64) uint8_t k_row[kMaxHeadDim * 4], v_row[kMaxHeadDim * 4];
  quantise<T>(k, dim, k_row, k_scale);
  quantise<T>(v, dim, v_row, v_scale);
  constexpr int kBeside = side_by_side(T), kBytes = element_bytes(T);
  uint8_t* const v_first = block.v + (offset / kBeside * dim * kBeside + offset % kBeside) * kBytes;
  if constexpr (T == kFp32) {
    scatter<uint32_t>(k_row, dim, block.k + offset * 4, n);
    memcpy(v_first, v_row, 4 * dim);
  } else if constexpr (T == kBf16) {
    scatter<uint32_t>(k_row, dim / 2, block.k + offset * 4, n);
    scatter<uint16_t>(v_row, dim, v_first, 2);
  } else if constexpr (T == kInt8) {
    scatter<uint32_t>(k_row, dim / 4, block.k + offset * 4, n);
    scatter<uint8_t>(v_row, dim, v_first, 4);
  } else {
    scatter<uint16_t>(k_row, dim / 2, block.k + offset * 2, n);
    scatter<uint8_t>(v_row, dim, v_first, 2);
  }
  if constexpr (T == kInt8) {
    block.k_scale[offset] = k_scale;
    block.v_scale[offset] = v_scale;
  }
}

void write_head(const Attributes& a, const HeadBlock& block, int offset, const float* k, const float* v) {
  switch (a.kv_dtype) {
    case kFp32: return write_head<kFp32>(a, block, offset, k, v);
    case kBf16: return write_head<kBf16>(a, block, offset, k, v);
    case kInt8: return write_head<kInt8>(a, block, offset, k, v);
    case kFp8: return write_head<kFp8>(a, block, offset, k, v);
  }
}

void append(const Attributes& a, const Step& s, int64_t token) {
  const int dim = a.head_dim, half = a.rotary_dim / 2;
  const float* q = s.qkv + token * (a.num_heads + 2 * a.num_kv_heads) * dim;
  const float* k = q + a.num_heads * dim;
  const float* v = k + a.num_kv_heads * dim;
  const float* cos = half ? s.cos + token * half : nullptr;
  const float* sin = half ? s.sin + token * half : nullptr;
  const bool full = a.qk_norm == kNormFull;

  float* rotated = s.output + token * a.num_heads * dim;
  const float q_inverse = full ? rms_inverse(q, a.norm_eps, a.num_heads * dim) : 0.0f;
  for (int h = 0; h < a.num_heads; ++h) {
    prepare_head(a, q, s.q_norm_weight, h, q_inverse, cos, sin, rotated + h * dim);
  }

  const int32_t slot = s.slot_mapping[token];
  if (slot < 0) return;
  const float k_inverse = full ? rms_inverse(k, a.norm_eps, a.num_kv_heads * dim) : 0.0f;
  float head[kMaxHeadDim];
  for (int h = 0; h < a.num_kv_heads; ++h) {
    prepare_head(a, k, s.k_norm_weight, h, k_inverse, cos, sin, head);
    write_head(a, head_block(a, s.pool, slot / a.block_size, h), slot % a.block_size, head, v + h * dim);
  }
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
