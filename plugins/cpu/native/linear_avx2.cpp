// The narrow linear kernels, compiled for avx2.
#define CASTLINE_ISA avx2
#define CASTLINE_ISA_AVX2
#include "linear_narrow.h"

namespace castline {
extern const LinearKernels kAvx2Linear;
const LinearKernels kAvx2Linear = {Isa::kAvx2, avx2::prepared_bytes, avx2::prepare, avx2::compute};
}  // namespace castline
