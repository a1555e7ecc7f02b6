#include "attention_kernels.h"

namespace castline {

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx512Fp16Kernels;
extern const Kernels kAmxKernels;
#endif

namespace {

const Kernels* const kWidestFirst[] = {
#if defined(__x86_64__)
    &kAmxKernels,
    &kAvx512Fp16Kernels,
    &kAvx512Kernels,
    &kAvx2Kernels,
#endif
    &kPortableKernels,
};

}  // namespace

const Kernels* select_kernels(int head_dim, std::string* error) {
  Isa selected;
  if (!selected_isa(&selected, error)) return nullptr;
  for (const Kernels* kernels : kWidestFirst) {
    if (runs_on(kernels->isa, selected) && head_dim >= kernels->min_head_dim) return kernels;
  }
  return &kPortableKernels;
}

}  // namespace castline
