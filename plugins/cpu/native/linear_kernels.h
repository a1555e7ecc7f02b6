// The linear kernels of every instruction set, and the choice among them.
#pragma once

#include <string>

#include "linear.h"

namespace castline {

struct LinearChoice {
  const LinearKernels* narrow;
  const LinearKernels* wide;  // nullptr where the selected instruction set has none
};

// The widest kernels that the selected instruction set allows. False, with the reason in *error*, where CASTLINE_ISA is
// refused.
bool select_linear_kernels(LinearChoice* choice, std::string* error);

}  // namespace castline
