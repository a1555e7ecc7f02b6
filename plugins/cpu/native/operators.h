// The custom operators of the library. Each lives as long as the library; *api* is that of the runtime that loaded it,
// *workers* how many threads the sessions have whose nodes it makes.
#pragma once

#include "ort_abi.h"

namespace castline {

const OrtCustomOp* paged_attention_op(const OrtApi* api, int workers);
const OrtCustomOp* linear_op(const OrtApi* api, int workers);
const OrtCustomOp* embedding_op(const OrtApi* api, int workers);

}  // namespace castline
