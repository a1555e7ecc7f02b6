// The custom operator castline::PagedAttention.
#pragma once

#include "ort_abi.h"

namespace castline {

// Lives as long as the library. *api* is that of the runtime that loaded it.
const OrtCustomOp* paged_attention_op(const OrtApi* api);

}  // namespace castline
