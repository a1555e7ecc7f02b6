// The instruction sets that the library was built with and the host can run.
#pragma once

#include <string>

#include "attention.h"

namespace castline {

// The widest kernels of the host that take *head_dim*; the environment variable CASTLINE_ISA names another choice
// (portable, avx2 or avx512). Returns nullptr and says why in *error* where that choice is unknown or the host lacks
// it.
const Kernels* select_kernels(int head_dim, std::string* error);

// Names of the instruction sets this host can run, widest first, separated by commas.
const std::string& available_isas();

}  // namespace castline
