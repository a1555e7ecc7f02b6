// The sampler's kernels, compiled for portable.
#define CASTLINE_ISA portable
#include "sampling_kernel.h"

namespace castline {
extern const SamplingKernels kPortableSampling;
const SamplingKernels kPortableSampling = {Isa::kPortable, portable::block_maxima, portable::peak,
    portable::block_weights, portable::sum_below, portable::sum_from, portable::collect};
}  // namespace castline
