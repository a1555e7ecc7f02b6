// The narrow linear kernels, compiled for portable.
#define CASTLINE_ISA portable
#include "linear_narrow.h"

namespace castline {
extern const LinearKernels kPortableLinear;
const LinearKernels kPortableLinear = {Isa::kPortable, portable::prepared_bytes, portable::prepare, portable::compute};
}  // namespace castline
