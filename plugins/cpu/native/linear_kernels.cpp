#include "linear_kernels.h"

namespace castline {

extern const LinearKernels kPortableLinear;
#if defined(__x86_64__)
extern const LinearKernels kAvx2Linear;
extern const LinearKernels kAvxVnniLinear;
extern const LinearKernels kAvx512Linear;
#endif

namespace {

const LinearKernels* const kNarrowWidestFirst[] = {
#if defined(__x86_64__)
    &kAvx512Linear,
    &kAvxVnniLinear,
    &kAvx2Linear,
#endif
    &kPortableLinear,
};

}  // namespace

bool select_linear_kernels(LinearChoice* choice, std::string* error) {
  Isa selected;
  if (!selected_isa(&selected, error)) return false;
  *choice = {&kPortableLinear, nullptr};
  for (const LinearKernels* kernels : kNarrowWidestFirst) {
    if (runs_on(kernels->isa, selected)) {
      choice->narrow = kernels;
      break;
    }
  }
  return true;
}

}  // namespace castline
