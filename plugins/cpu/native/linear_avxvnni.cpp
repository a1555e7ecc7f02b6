// The narrow linear kernels, compiled for avxvnni.
#define CASTLINE_ISA avxvnni
#define CASTLINE_ISA_AVX2
#define CASTLINE_ISA_AVXVNNI
#include "linear_narrow.h"

namespace castline {
extern const LinearKernels kAvxVnniLinear;
const LinearKernels kAvxVnniLinear = {Isa::kAvxVnni, avxvnni::prepared_bytes, avxvnni::prepare, avxvnni::compute};
}  // namespace castline
