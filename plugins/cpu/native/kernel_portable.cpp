// The kernels, compiled for portable.
#define CASTLINE_ISA portable

#include "kernel.h"

namespace castline {
extern const Kernels kPortableKernels;
const Kernels kPortableKernels = {Isa::kPortable,   8, 32, portable::scratch_floats, portable::append,
                                  portable::attend, portable::merge};
}  // namespace castline
