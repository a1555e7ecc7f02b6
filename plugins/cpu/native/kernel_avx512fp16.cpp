// The kernels, compiled for avx512fp16: sums of halves for fp8 pools, everything else as for avx512.
#define CASTLINE_ISA avx512fp16
#define CASTLINE_ISA_AVX512
#define CASTLINE_FP8_HALF
#include "kernel.h"

namespace castline {
extern const Kernels kAvx512Fp16Kernels;
const Kernels kAvx512Fp16Kernels = {Isa::kAvx512Fp16,   16, 32, avx512fp16::scratch_floats, avx512fp16::append,
                                    avx512fp16::attend, avx512fp16::merge};
}  // namespace castline
