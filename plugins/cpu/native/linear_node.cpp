#include "linear_node.h"

namespace castline {
namespace {

constexpr int kMaxK = 1 << 16;  // sums of K products of a signed and an unsigned byte stay within 32 bits

bool takes_group(LinearFormat format, int group) {
  return group == 32 || (group == 64 && format != kW4Dm) || (group == 0 && format == kW8);
}

int64_t strips(const LinearAttributes& a) { return static_cast<int64_t>(units(a)) * strips_per_unit(a); }

std::string check_shapes(const LinearAttributes& a, const Tensor (&in)[kLinearInputs]) {
  std::string problem = check_shape("x", in[0], {-1, a.k});
  if (problem.empty()) problem = check_packed(a, in[1], in[2]);
  if (problem.empty() && a.norm) problem = check_shape("norm_weight", in[3], {a.k});
  if (problem.empty() && !a.norm && in[3].present) problem = "norm_weight is given, but norm is 0";
  if (problem.empty() && in[4].present) {
    problem = a.gated ? check_shape("bias", in[4], {2, a.n}) : check_shape("bias", in[4], {a.n});
  }
  if (problem.empty() && in[5].present) problem = check_shape("residual", in[5], {in[0].dims[0], a.n});
  return problem;
}

}  // namespace

OrtStatus* read_embedding_attributes(const OrtApi* api, const OrtKernelInfo* info, LinearAttributes* out) {
  AttributeReader read(api, info);
  LinearAttributes a = {};
  a.k = read.integer("k");
  a.n = read.integer("n");
  a.format = static_cast<LinearFormat>(read.integer("format"));
  a.group = read.integer("group");
  *out = a;
  return read.status();
}

OrtStatus* read_linear_attributes(const OrtApi* api, const OrtKernelInfo* info, LinearAttributes* out) {
  if (OrtStatus* status = read_embedding_attributes(api, info, out)) return status;
  AttributeReader read(api, info);
  out->activation = static_cast<Activation>(read.integer("activation", kNoActivation));
  out->gated = read.integer("gated", 0) != 0;
  out->norm = read.integer("norm", 0) != 0;
  out->norm_eps = read.number("norm_eps", 1e-6f);
  out->wide_rows = read.integer("wide_rows", 0);
  return read.status();
}

std::string check_attributes(const LinearAttributes& a) {
  if (a.k < 1 || a.k > kMaxK) return join("k ", a.k, " is not in 1 .. ", kMaxK);
  if (a.n < 1) return join("n ", a.n, " is not positive");
  if (a.format < kW4Dm || a.format > kW8) return join("format ", a.format, " is not 0 (W4_DM), 1 (W4) or 2 (W8)");
  if (!takes_group(a.format, a.group)) return join("format ", a.format, " takes no groups of ", a.group);
  if (a.activation < kNoActivation || a.activation > kRelu) return join("activation ", a.activation, " is unknown");
  if (!(a.norm_eps >= 0.0f)) return join("norm_eps ", a.norm_eps, " is negative");
  return "";
}

std::string check_packed(const LinearAttributes& a, const Tensor& weight, const Tensor& scales) {
  std::string problem = check_shape("weight", weight, {strips(a), static_cast<int64_t>(strip_bytes(a))});
  if (problem.empty()) problem = check_shape("scales", scales, {strips(a), static_cast<int64_t>(strip_scales(a))});
  return problem;
}

OrtStatus* read_linear_step(const OrtApi* api, const OrtKernelContext* context, const LinearAttributes& a,
                            LinearStep* step, std::string* problem) {
  Tensor in[kLinearInputs];
  for (int i = 0; i < kLinearInputs; ++i) {
    if (OrtStatus* status = read_tensor(api, context, i, &in[i])) return status;
  }
  *problem = check_shapes(a, in);
  const auto floats = [&](int i) { return static_cast<const float*>(in[i].data); };
  *step = {in[0].dims[0],
           floats(0),
           static_cast<const uint8_t*>(in[1].data),
           static_cast<const uint16_t*>(in[2].data),
           floats(3),
           floats(4),
           floats(5),
           nullptr,
           nullptr};
  return nullptr;
}

}  // namespace castline
