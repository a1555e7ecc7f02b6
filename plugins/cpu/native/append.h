// Append: QK-norm, RoPE, quantise and write K and V of one token. Included by kernel.h only.
//
// The arithmetic is that of castline.plugins.reference to the last bit (no fused multiply-add, the norm's sum in double),
// so that the quantised K and V are equal and not merely close.
#pragma once

#include "layout.h"
#include "numeric.h"

namespace castline::CASTLINE_ISA {
namespace {

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

float int8_scale(const float* x, int count) {
  float largest = 0;
  for (int i = 0; i < count; ++i) {
    const float magnitude = __builtin_fabsf(x[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest / 127.0f;
}

void write_head(const Attributes& a, const HeadBlock& block, int offset, const float* k, const float* v) {
  const int n = a.block_size, dim = a.head_dim;
  if (a.kv_dtype == kFp32) {
    float* k_out = reinterpret_cast<float*>(block.k) + k_index(kFp32, n, offset, 0);
    for (int d = 0; d < dim; ++d) k_out[d * n] = k[d];
    memcpy(reinterpret_cast<float*>(block.v) + v_index(kFp32, dim, offset, 0), v, sizeof(float) * dim);
  } else if (a.kv_dtype == kBf16) {
    uint16_t* k_out = reinterpret_cast<uint16_t*>(block.k);
    uint16_t* v_out = reinterpret_cast<uint16_t*>(block.v);
    for (int d = 0; d < dim; ++d) k_out[k_index(kBf16, n, offset, d)] = to_bf16(k[d]);
    for (int d = 0; d < dim; ++d) v_out[v_index(kBf16, dim, offset, d)] = to_bf16(v[d]);
  } else if (a.kv_dtype == kFp8) {
    for (int d = 0; d < dim; ++d) block.k[k_index(kFp8, n, offset, d)] = to_fp8(k[d]);
    for (int d = 0; d < dim; ++d) block.v[v_index(kFp8, dim, offset, d)] = to_fp8(v[d]);
  } else {
    const float k_scale = int8_scale(k, dim), v_scale = int8_scale(v, dim);
    block.k_scale[offset] = k_scale;
    block.v_scale[offset] = v_scale;
    for (int d = 0; d < dim; ++d) block.k[k_index(kInt8, n, offset, d)] = static_cast<uint8_t>(to_int8(k[d], k_scale));
    for (int d = 0; d < dim; ++d) block.v[v_index(kInt8, dim, offset, d)] = static_cast<uint8_t>(to_int8(v[d], v_scale));
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
