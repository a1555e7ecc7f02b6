// The kernels, compiled for avx2.
#define CASTLINE_ISA avx2
#define CASTLINE_ISA_AVX2
#include "kernel.h"

namespace castline {
extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels = {Isa::kAvx2, 8, 32, avx2::scratch_floats, avx2::append, avx2::attend, avx2::merge};
}  // namespace castline
