// What the linear operator and its kernels share: plain data, no code. The mathematics and the layout of packed weights
// are castline.plugins.linear's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace castline {

// Codes of castline.plugins.linear.
enum LinearFormat : int { kW4Dm = 0, kW4 = 1, kW8 = 2 };
enum Activation : int { kNoActivation = 0, kSilu = 1, kGelu = 2, kGeluTanh = 3, kRelu = 4 };

constexpr int kStrip = 16;
constexpr int kActivationGroup = 32;
constexpr int kKAlignment = 64;

struct LinearAttributes {
  int k, n;
  LinearFormat format;
  int group;
  Activation activation;
  bool gated, norm;
  float norm_eps;
  int wide_rows;
};

// static: headers that a kernel unit includes define no function with external linkage (see attention.h).
static inline int padded_k(const LinearAttributes& a) { return (a.k + kKAlignment - 1) / kKAlignment * kKAlignment; }
static inline int scale_groups(const LinearAttributes& a) { return a.group == 0 ? 1 : padded_k(a) / a.group; }

// A unit is what yields 16 columns of the output: one strip, or a gate strip and its up strip.
static inline int strips_per_unit(const LinearAttributes& a) { return a.gated ? 2 : 1; }
static inline int units(const LinearAttributes& a) { return (a.n + kStrip - 1) / kStrip; }

static inline size_t strip_bytes(const LinearAttributes& a) {
  return static_cast<size_t>(padded_k(a)) * kStrip / (a.format == kW8 ? 1 : 2);
}
static inline size_t strip_scales(const LinearAttributes& a) {
  return static_cast<size_t>(scale_groups(a)) * kStrip * (a.format == kW4Dm ? 2 : 1);
}

// One call: shapes already checked.
struct LinearStep {
  int64_t rows;
  const float* x;
  const uint8_t* weight;
  const uint16_t* scales;  // fp16
  const float* norm_weight;
  const float* bias;      // may be nullptr
  const float* residual;  // may be nullptr
  float* output;
  float* maxima;  // [rows][blocks of kTokenBlock columns], or nullptr
};

// The kernels of one instruction set and one way of rounding activations (narrow or wide).
struct LinearKernels {
  Isa isa;
  // Bytes that `prepare` writes for *rows* rows; the operator gives 64-byte aligned memory.
  size_t (*prepared_bytes)(const LinearAttributes&, int64_t rows);
  // Norm and rounding of the rows first .. last, into *prepared*, which holds all rows of the step. Rows are
  // independent: threads may prepare different rows at once.
  void (*prepare)(const LinearAttributes&, const LinearStep&, int64_t first, int64_t last, uint8_t* prepared);
  // All rows of the units first .. last, with bias, activation and residual, into step.output.
  void (*compute)(const LinearAttributes&, const LinearStep&, int first, int last, const uint8_t* prepared);
};

}  // namespace castline
