// The operator castline::Embedding: rows of a packed matrix as floats.
#include <string>

#include "custom_op.h"
#include "linear_node.h"
#include "numeric.h"
#include "operators.h"
#include "parallel.h"
#include "rehearsal.h"
#include "resident.h"

namespace castline {
namespace {

std::string describe(const LinearAttributes& a, const std::string& problem) {
  return join("Embedding ", a.n, " x ", a.k, ": ", problem);
}

// Code of element *e* of a column; *column* is its first byte in the strip.
int code(LinearFormat format, const uint8_t* column, int e) {
  if (format == kW8) return column[e / 4 * 64 + e % 4] - 128;
  const uint8_t byte = column[e / 8 * 64 + e % 4];
  const int q = e % 8 >= 4 ? byte >> 4 : byte & 15;
  return format == kW4 ? q - 8 : q;
}

void read_row(const LinearAttributes& a, const uint8_t* weight, const uint16_t* scales, int64_t row, float* out) {
  const uint8_t* column = weight + row / kStrip * strip_bytes(a) + row % kStrip * 4;
  const uint16_t* scale = scales + row / kStrip * strip_scales(a) + row % kStrip;
  const int group = a.group == 0 ? a.k : a.group;
  for (int first = 0; first < a.k; first += group) {
    const float d = half_to_float(scale[0]);
    const float m = a.format == kW4Dm ? half_to_float(scale[kStrip]) : 0.0f;
    const int last = first + group < a.k ? first + group : a.k;
    for (int e = first; e < last; ++e) out[e] = d * static_cast<float>(code(a.format, column, e)) + m;
    scale += a.format == kW4Dm ? 2 * kStrip : kStrip;
  }
}

struct EmbeddingNode {
  LinearAttributes attributes;
  Resident weight, scales;
};

struct Embedding {
  static constexpr const char* kName = "Embedding";
  static constexpr int kInputs = 3, kOutputs = 1;
  using Kernel = EmbeddingNode;

  static int input_type(int i) { return i == 0 ? ort::kInt64 : i == 1 ? ort::kUint8 : ort::kFloat16; }
  static bool is_optional(int) { return false; }

  static OrtStatus* create(const OrtApi* api, const OrtKernelInfo* info, int, EmbeddingNode* node) {
    const LinearAttributes& a = node->attributes;
    if (OrtStatus* status = read_embedding_attributes(api, info, &node->attributes)) return status;
    const std::string problem = check_attributes(a);
    if (!problem.empty()) return invalid_argument(api, describe(a, problem));
    if (OrtStatus* status = node->weight.watch(api, info, 1, sizeof(uint8_t), false)) return status;
    return node->scales.watch(api, info, 2, sizeof(uint16_t), false);
  }

  static OrtStatus* compute(const OrtApi* api, const EmbeddingNode& node, OrtKernelContext* context) {
    const LinearAttributes& a = node.attributes;
    Tensor in[kInputs];
    for (int i = 0; i < kInputs; ++i) {
      if (OrtStatus* status = read_tensor(api, context, i, &in[i])) return status;
    }
    std::string problem = check_shape("ids", in[0], {-1});
    if (problem.empty()) problem = check_packed(a, in[1], in[2]);
    const auto* ids = static_cast<const int64_t*>(in[0].data);
    const int64_t rows = in[0].dims[0];
    for (int64_t i = 0; problem.empty() && i < rows; ++i) {
      if (ids[i] < 0 || ids[i] >= a.n) problem = join("ids[", i, "] is ", ids[i], ", not in 0 .. ", a.n - 1);
    }
    if (!problem.empty()) return invalid_argument(api, describe(a, problem));
    float* output = nullptr;
    if (OrtStatus* status = make_output(api, context, 0, {rows, a.k}, &output)) return status;
    if (rehearsing()) {
      touch(output, rows * a.k);
      return nullptr;
    }
    const auto* weight = node.weight.at<uint8_t>(in[1].data);
    const auto* scales = node.scales.at<uint16_t>(in[2].data);
    return for_each(api, context, rows, 4.0 * rows * a.k, [&](size_t i) {
      read_row(a, weight, scales, ids[i], output + i * a.k);
    });
  }
};

}  // namespace

const OrtCustomOp* embedding_op(const OrtApi* api, int workers) { return custom_op<Embedding>(api, workers); }

}  // namespace castline
