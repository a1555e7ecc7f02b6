// Constant inputs of nodes, and where their kernels read them: in the file that ONNX Runtime mapped, or in a copy that
// lies in huge pages. Weights are read whole in every step; through pages of 4 KiB a step pays for a walk of the page
// tables every 4 KiB of them, and every walk is a chance to be held up where the machine is virtual.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "ort_abi.h"

namespace castline {

class HugePages;

// The weights of one session, 0 of none. A thread that opens a session watches for it from `begin_watching` to
// `end_watching`: nodes that it makes meanwhile belong to the group, and no others.
using WeightGroup = uint64_t;
WeightGroup begin_watching();
void end_watching();

// One constant input of one node. It outlives the memory that ONNX Runtime gave it: whoever closes a session sees to it
// that nobody moves its group then.
class Resident {
 public:
  Resident() = default;
  Resident(const Resident&) = delete;
  Resident& operator=(const Resident&) = delete;
  ~Resident();

  // Input *index* of the node. One that is not constant stays where it is, and so do those of no group. *read_whole*: a
  // step reads all of it, so that it is worth a copy; one of which steps read rows only joins the copy that another node
  // has.
  OrtStatus* watch(const OrtApi* api, const OrtKernelInfo* info, size_t index, size_t element_bytes, bool read_whole);

  // Where to read an input that is *mapped* here.
  template <class T>
  const T* at(const void* mapped) const {
    const void* copy = copy_.load(std::memory_order_acquire);
    return static_cast<const T*>(copy != nullptr ? copy : mapped);
  }

 private:
  friend class Residents;

  WeightGroup group_ = 0;
  const void* source_ = nullptr;
  size_t bytes_ = 0;
  bool read_whole_ = false;
  bool settled_ = false;  // copied, or not to be
  std::atomic<const void*> copy_{nullptr};
  std::shared_ptr<HugePages> pages_;  // what holds the copy
};

// Copies what of *group* lies in mapped files into huge pages, until *enough* bytes are copied or none is left, and gives
// the files' pages back. Steps may run meanwhile, for the copy holds the same bytes; the session must stay open. Returns
// how many were copied, 0 when there is nothing left to copy, or no memory.
size_t move_residents(WeightGroup group, size_t enough);

}  // namespace castline
