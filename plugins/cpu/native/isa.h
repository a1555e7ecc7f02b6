// The instruction sets that the library was built with and the host can run.
#pragma once

#include <string>

namespace castline {

// Ordered by preference. kAvx2: AVX2, FMA, F16C. kAvxVnni: kAvx2 and 256-bit VNNI. kAvx512: F, BW, DQ, VL, VNNI.
// kAvx512Fp16: kAvx512 and AVX512_FP16. kAmx: kAvx512Fp16, AVX512_BF16, GFNI, and tiles of bf16 and int8 that the system
// lets this process use.
enum class Isa : int { kPortable = 0, kAvx2 = 1, kAvxVnni = 2, kAvx512 = 3, kAvx512Fp16 = 4, kAmx = 5 };

const char* isa_name(Isa isa);

// Whether this host can run code compiled for *isa*.
bool host_has(Isa isa);

// What the environment variable CASTLINE_ISA names (portable, avx2, avxvnni, avx512, avx512fp16 or amx), or the widest of
// the host. False, with the reason in *error*, where the name is unknown or the host lacks it. Kernels are the widest
// written for this instruction set or for one that it contains (see runs_on).
bool selected_isa(Isa* isa, std::string* error);

// Whether a host that was told to use *selected* may run kernels written for *kernel*.
bool runs_on(Isa kernel, Isa selected);

// Names of the instruction sets this host can run, widest first, separated by commas.
const std::string& available_isas();

}  // namespace castline
