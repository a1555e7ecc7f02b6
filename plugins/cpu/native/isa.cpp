#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <vector>

namespace castline {

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

namespace {

// Widest first.
std::vector<const Kernels*> detect() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (avx512) found.push_back(&kAvx512Kernels);
  if (avx2) found.push_back(&kAvx2Kernels);
#endif
  found.push_back(&kPortableKernels);
  return found;
}

const std::vector<const Kernels*>& host_kernels() {
  static const std::vector<const Kernels*> kernels = detect();
  return kernels;
}

}  // namespace

const std::string& available_isas() {
  static const std::string names = [] {
    std::string joined;
    for (const Kernels* kernels : host_kernels()) joined += (joined.empty() ? "" : ",") + std::string(kernels->isa);
    return joined;
  }();
  return names;
}

const Kernels* select_kernels(int head_dim, std::string* error) {
  const char* wanted = std::getenv("CASTLINE_ISA");
  bool seen = wanted == nullptr || *wanted == '\0';
  for (const Kernels* kernels : host_kernels()) {
    seen = seen || std::strcmp(kernels->isa, wanted) == 0;
    if (seen && head_dim >= kernels->min_head_dim) return kernels;
  }
  *error = "CASTLINE_ISA is '" + std::string(wanted) + "', which this host or this build of the plugin lacks; it has " +
           available_isas();
  return nullptr;
}

}  // namespace castline
