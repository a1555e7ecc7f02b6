#include "isa.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace castline {
namespace {

constexpr Isa kWidestFirst[] = {Isa::kAmx,     Isa::kAvx512Fp16, Isa::kAvx512,
                                Isa::kAvxVnni, Isa::kAvx2,       Isa::kPortable};

#if defined(__x86_64__)

// Feature bits of CPUID leaf 7, subleaf 1, EAX, which GCC 12 cannot be asked for by name.
bool leaf_7_1_eax(int bit) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> bit & 1u) != 0;
}

bool leaf_7_0_ecx(int bit) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ecx >> bit & 1u) != 0;
}

bool leaf_7_0_edx(int bit) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx >> bit & 1u) != 0;
}

// Tile registers are off until a process asks the system for them; the grant holds for its threads.
bool tiles_granted() {
#if defined(__linux__)
  constexpr long kArchReqXcompPerm = 0x1023, kXtileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXtileData) == 0;
#else
  return false;
#endif
}

struct Host {
  bool avx2, avxvnni, avx512, avx512fp16, amx;
};

Host detect() {
  __builtin_cpu_init();
  Host h = {};
  h.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  h.avxvnni = h.avx2 && leaf_7_1_eax(4);
  h.avx512 = h.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512vnni");
  const bool tiles = leaf_7_0_edx(22) && leaf_7_0_edx(24) && leaf_7_0_edx(25);
  h.avx512fp16 = h.avx512 && leaf_7_0_edx(23);
  h.amx = h.avx512fp16 && leaf_7_0_ecx(8) && leaf_7_1_eax(5) && tiles && tiles_granted();
  return h;
}

#endif

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAmx: return "amx";
    case Isa::kAvx512Fp16: return "avx512fp16";
    case Isa::kAvx512: return "avx512";
    case Isa::kAvxVnni: return "avxvnni";
    case Isa::kAvx2: return "avx2";
    case Isa::kPortable: break;
  }
  return "portable";
}

bool host_has(Isa isa) {
#if defined(__x86_64__)
  static const Host host = detect();
  switch (isa) {
    case Isa::kAmx: return host.amx;
    case Isa::kAvx512Fp16: return host.avx512fp16;
    case Isa::kAvx512: return host.avx512;
    case Isa::kAvxVnni: return host.avxvnni;
    case Isa::kAvx2: return host.avx2;
    case Isa::kPortable: break;
  }
#endif
  return isa == Isa::kPortable;
}

bool runs_on(Isa kernel, Isa selected) {
  // AVX-512 hosts need not have the 256-bit VNNI encoding.
  return static_cast<int>(kernel) <= static_cast<int>(selected) && host_has(kernel);
}

const std::string& available_isas() {
  static const std::string names = [] {
    std::string joined;
    for (const Isa isa : kWidestFirst) {
      if (host_has(isa)) joined += (joined.empty() ? "" : ",") + std::string(isa_name(isa));
    }
    return joined;
  }();
  return names;
}

bool selected_isa(Isa* isa, std::string* error) {
  const char* wanted = std::getenv("CASTLINE_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  for (const Isa candidate : kWidestFirst) {
    if (host_has(candidate) && (any || std::strcmp(isa_name(candidate), wanted) == 0)) {
      *isa = candidate;
      return true;
    }
  }
  *error = "CASTLINE_ISA is '" + std::string(wanted) + "', which this host or this build of the plugin lacks; it has " +
           available_isas();
  return false;
}

}  // namespace castline
