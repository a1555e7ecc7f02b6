// Work on the threads of the session that runs a node, and memory of a thread.
#pragma once

#include <cstdlib>
#include <new>

#include "ort_abi.h"

namespace castline {

// Below this many multiply-adds, handing work to another thread costs more than it saves.
constexpr double kInlineCost = 65536;

// Runs function(0 .. total - 1) on the session's threads, one index at a time, or here where there is little to do.
template <class Function>
OrtStatus* for_each(const OrtApi* api, const OrtKernelContext* context, size_t total, double cost, Function function) {
  if (cost < kInlineCost || total < 2) {
    for (size_t i = 0; i < total; ++i) function(i);
    return nullptr;
  }
  const auto run = [](void* data, size_t i) { (*static_cast<Function*>(data))(i); };
  return ort::parallel_for(api, context, run, total, total, &function);
}

// 64-byte aligned memory that only grows. get() returns nullptr where there is no memory.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  template <class T>
  T* get(size_t count) {
    const size_t bytes = count * sizeof(T);
    if (bytes > capacity_) {
      std::free(data_);
      capacity_ = 0;
      data_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
      if (data_ != nullptr) capacity_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace castline
