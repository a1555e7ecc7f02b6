// The narrow linear kernels, compiled for avx512.
#define CASTLINE_ISA avx512
#define CASTLINE_ISA_AVX512
#include "linear_narrow.h"

namespace castline {
extern const LinearKernels kAvx512Linear;
const LinearKernels kAvx512Linear = {Isa::kAvx512, avx512::prepared_bytes, avx512::prepare, avx512::compute};
}  // namespace castline
