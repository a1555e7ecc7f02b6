#include "linear_kernels.h"

namespace castline {

extern const LinearKernels kPortableLinear;
#if defined(__x86_64__)
extern const LinearKernels kAvx2Linear;
extern const LinearKernels kAvxVnniLinear;
extern const LinearKernels kAvx512Linear;
extern const LinearKernels kAmxLinear;
#endif

namespace {

const LinearKernels* const kNarrowWidestFirst[] = {
#if defined(__x86_64__)
    &kAvx512Linear,
    &kAvxVnniLinear,
    &kAvx2Linear,
#endif
    &kPortableLinear,
    nullptr,
};

const LinearKernels* const kWideWidestFirst[] = {
#if defined(__x86_64__)
    &kAmxLinear,
#endif
    nullptr,
};

// The first of a table that the selected instruction set allows, or nullptr at the table's end.
const LinearKernels* first_allowed(const LinearKernels* const* widest_first, Isa selected) {
  while (*widest_first != nullptr && !runs_on((*widest_first)->isa, selected)) ++widest_first;
  return *widest_first;
}

}  // namespace

bool select_linear_kernels(LinearChoice* choice, std::string* error) {
  Isa selected;
  if (!selected_isa(&selected, error)) return false;
  *choice = {first_allowed(kNarrowWidestFirst, selected), first_allowed(kWideWidestFirst, selected)};
  return true;
}

}  // namespace castline
