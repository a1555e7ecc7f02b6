// The kernels, compiled for avx512.
#define CASTLINE_ISA avx512
#define CASTLINE_ISA_AVX512
#include "kernel.h"

namespace castline {
extern const Kernels kAvx512Kernels;
const Kernels kAvx512Kernels = {Isa::kAvx512,   16, 32, avx512::scratch_floats, avx512::append,
                                avx512::attend, avx512::merge};
}  // namespace castline
