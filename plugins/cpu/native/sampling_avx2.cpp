// The sampler's kernels, compiled for avx2.
#define CASTLINE_ISA avx2
#define CASTLINE_ISA_AVX2
#include "sampling_kernel.h"

namespace castline {
extern const SamplingKernels kAvx2Sampling;
const SamplingKernels kAvx2Sampling = {Isa::kAvx2, avx2::block_maxima, avx2::peak,
    avx2::block_weights, avx2::sum_below, avx2::sum_from, avx2::collect};
}  // namespace castline
