// The sampler's kernels, compiled for avx512.
#define CASTLINE_ISA avx512
#define CASTLINE_ISA_AVX512
#include "sampling_kernel.h"

namespace castline {
extern const SamplingKernels kAvx512Sampling;
const SamplingKernels kAvx512Sampling = {Isa::kAvx512, avx512::block_maxima, avx512::peak,
    avx512::block_weights, avx512::sum_below, avx512::sum_from, avx512::collect};
}  // namespace castline
