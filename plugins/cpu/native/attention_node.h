// Reads an attention node's attributes and inputs. A status that is not nullptr is the caller's to return.
#pragma once

#include "attention.h"
#include "checks.h"
#include "ort_abi.h"

namespace castline {

// Numbers that a model must set are required; the others default as castline.plugins.contract says.
OrtStatus* read_attributes(const OrtApi* api, const OrtKernelInfo* info, Attributes* out);

OrtStatus* read_inputs(const OrtApi* api, const OrtKernelContext* context, Tensor (&out)[kInputs]);

// The step of inputs that check_shapes has passed; its output is still to be set.
Step make_step(const Tensor (&inputs)[kInputs]);

}  // namespace castline
