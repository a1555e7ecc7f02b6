// The attention kernels of every instruction set, and the choice among them.
#pragma once

#include <string>

#include "attention.h"

namespace castline {

// The widest kernels that the selected instruction set allows and that take *head_dim*. Returns nullptr and says why
// in *error* where CASTLINE_ISA is refused.
const Kernels* select_kernels(int head_dim, std::string* error);

}  // namespace castline
