// Constant inputs of nodes, and where their kernels read them: in the file that ONNX Runtime mapped, or in a copy that
// lies in huge pages. Weights are read whole in every step; through pages of 4 KiB a step pays for a walk of the page
// tables every 4 KiB of them, and every walk is a chance to be held up where the machine is virtual.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "ort_abi.h"

namespace castline {

class HugePages;

// One constant input of one node. Registered while it lives, and it lives no longer than its session.
class Resident {
 public:
  Resident() = default;
  Resident(const Resident&) = delete;
  Resident& operator=(const Resident&) = delete;
  ~Resident();

  // Input *index* of the node. One that is not constant stays where it is. *read_whole*: a step reads all of it, so that
  // it is worth a copy; one of which steps read rows only joins the copy that another node's input has.
  OrtStatus* watch(const OrtApi* api, const OrtKernelInfo* info, size_t index, size_t element_bytes, bool read_whole);

  // Where to read an input that is *mapped* here.
  template <class T>
  const T* at(const void* mapped) const {
    const void* copy = copy_.load(std::memory_order_acquire);
    return static_cast<const T*>(copy != nullptr ? copy : mapped);
  }

 private:
  friend class Residents;

  const void* source_ = nullptr;
  size_t bytes_ = 0;
  bool read_whole_ = false;
  bool settled_ = false;  // copied, or not to be
  std::atomic<const void*> copy_{nullptr};
  std::shared_ptr<HugePages> pages_;  // what holds the copy
};

// Copies watched inputs that lie in mapped files into huge pages, until *enough* bytes are copied or none is left, and
// gives the files' pages back. Steps may run meanwhile: the copy holds the same bytes. Returns how many were copied, 0
// when there is nothing left to copy, or no memory.
size_t move_residents(size_t enough);

}  // namespace castline
