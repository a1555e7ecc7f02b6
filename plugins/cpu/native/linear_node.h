// Reads and checks the nodes of castline.plugins.linear. A step that passes cannot make a kernel read or write outside
// its tensors.
#pragma once

#include <string>

#include "linear.h"
#include "node_reader.h"

namespace castline {

// Numbers that a model must set are required; the others default as castline.plugins.linear says.
OrtStatus* read_linear_attributes(const OrtApi* api, const OrtKernelInfo* info, LinearAttributes* out);

// k, n, format and group only; the rest as in a node without norm, bias, activation and residual.
OrtStatus* read_embedding_attributes(const OrtApi* api, const OrtKernelInfo* info, LinearAttributes* out);

// Empty where the attributes are usable, else what is wrong.
std::string check_attributes(const LinearAttributes& a);

// Empty where packed weights have the shapes that the attributes call for, else what is wrong.
std::string check_packed(const LinearAttributes& a, const Tensor& weight, const Tensor& scales);

constexpr int kLinearInputs = 6;

// Inputs of one call: fills *step* but for the output. *problem* says what is wrong with a shape, or stays empty.
OrtStatus* read_linear_step(const OrtApi* api, const OrtKernelContext* context, const LinearAttributes& a,
                            LinearStep* step, std::string* problem);

}  // namespace castline
