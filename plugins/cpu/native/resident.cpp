#include "resident.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#endif

namespace castline {
namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kReserved = 64 << 20;  // address space at once; memory comes as it is filled
constexpr size_t kAlignment = 64;       // what the kernels were given before: tensors of a file begin on pages

thread_local WeightGroup watched_group = 0;

size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

}  // namespace

#ifdef __linux__

// Memory for copies, filled front to back.
class HugePages {
 public:
  explicit HugePages(size_t size) : mapped_(size + kHugePage) {
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return;
    begin_ = memory;
    next_ = round_up(reinterpret_cast<uintptr_t>(memory), kHugePage);
    end_ = next_ + size;
    usable_ = madvise(reinterpret_cast<void*>(next_), size, MADV_HUGEPAGE) == 0;
  }
  HugePages(const HugePages&) = delete;
  ~HugePages() {
    if (begin_ != nullptr) munmap(begin_, mapped_);
  }

  // nullptr where *bytes* do not fit.
  void* take(size_t bytes) {
    if (!usable_ || bytes > end_ - next_) return nullptr;
    void* taken = reinterpret_cast<void*>(next_);
    next_ = std::min(end_, round_up(next_ + bytes, kAlignment));
    return taken;
  }

 private:
  size_t mapped_;
  void* begin_ = nullptr;
  uintptr_t next_ = 0, end_ = 0;
  bool usable_ = false;
};

namespace {

// Addresses that are private mappings of files, as of one moment.
class FileMappings {
 public:
  void read() {
    ranges_.clear();
    FILE* maps = std::fopen("/proc/self/maps", "re");
    if (maps == nullptr) return;
    char line[512];
    bool whole = true;  // a path may be longer than the line kept: what follows is no range
    while (std::fgets(line, sizeof line, maps) != nullptr) {
      const bool begins = whole;
      whole = std::strchr(line, '\n') != nullptr;
      uintptr_t first, last;
      char access[5];
      uint64_t inode;
      if (begins && std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %*s %*s %" SCNu64, &first, &last, access, &inode) == 4 &&
          inode != 0 && access[3] == 'p') {
        ranges_.push_back({first, last});
      }
    }
    std::fclose(maps);
  }
  // Neighbours of one file count as one.
  bool hold(const void* data, size_t bytes) const {
    uintptr_t from = reinterpret_cast<uintptr_t>(data);
    const uintptr_t to = from + bytes;
    for (const auto& range : ranges_) {
      if (range.first <= from && from < range.second) from = range.second;
    }
    return from >= to;
  }

 private:
  std::vector<std::pair<uintptr_t, uintptr_t>> ranges_;  // ascending
};

// The pages that lie wholly within come from the file again, should anybody read them.
void give_back(const void* data, size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = round_up(reinterpret_cast<uintptr_t>(data), page);
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace

// All of the process.
class Residents {
 public:
  static Residents& instance() {
    static Residents& all = *new Residents;  // never destroyed: nodes may outlive it otherwise
    return all;
  }

  void add(Resident* resident) {
    std::lock_guard<std::mutex> lock(mutex_);
    all_.push_back(resident);
    known_mappings_ = false;
  }

  void remove(Resident* resident) {
    std::lock_guard<std::mutex> lock(mutex_);
    all_.erase(std::remove(all_.begin(), all_.end(), resident), all_.end());
    if (all_.empty()) open_ = nullptr;
    known_mappings_ = false;
  }

  // In the order of their addresses. Other sessions may open and close between two copies.
  size_t move(WeightGroup group, size_t enough) {
    size_t moved = 0;
    while (moved < enough) {
      std::lock_guard<std::mutex> lock(mutex_);
      Resident* next = first_waiting(group);
      if (next == nullptr) {
        open_ = nullptr;  // it stays with those whose copies it holds
        break;
      }
      next->settled_ = true;
      if (!in_a_file(*next)) continue;
      if (!copy(*next)) {
        open_ = std::make_shared<HugePages>(round_up(std::max(next->bytes_, kReserved), kHugePage));
        if (!copy(*next)) continue;
      }
      moved += next->bytes_;
    }
    return moved;
  }

 private:
  // Of those that are worth a copy and were not looked at, the input lowest in memory.
  Resident* first_waiting(WeightGroup group) const {
    const std::less<const void*> below;
    Resident* first = nullptr;
    for (Resident* r : all_) {
      const bool waits = r->group_ == group && r->read_whole_ && !r->settled_;
      if (waits && (first == nullptr || below(r->source_, first->source_))) first = r;
    }
    return first;
  }

  // Its session is open, so that what is mapped there stays.
  bool in_a_file(const Resident& resident) {
    if (!known_mappings_) mappings_.read();
    known_mappings_ = true;
    return mappings_.hold(resident.source_, resident.bytes_);
  }

  // For every node that reads it. False where it does not fit what is open.
  bool copy(const Resident& wanted) {
    void* memory = open_ == nullptr ? nullptr : open_->take(wanted.bytes_);
    if (memory == nullptr) return false;
    std::memcpy(memory, wanted.source_, wanted.bytes_);
    for (Resident* r : all_) {
      if (r->group_ != wanted.group_ || r->source_ != wanted.source_ || r->bytes_ != wanted.bytes_) continue;
      r->settled_ = true;
      r->pages_ = open_;
      r->copy_.store(memory, std::memory_order_release);
    }
    give_back(wanted.source_, wanted.bytes_);
    return true;
  }

  std::mutex mutex_;
  std::vector<Resident*> all_;
  std::shared_ptr<HugePages> open_;  // where the next copy goes, if it fits
  FileMappings mappings_;
  bool known_mappings_ = false;  // nothing was opened or closed since
};

#else

class HugePages {};

class Residents {
 public:
  static Residents& instance() {
    static Residents none;
    return none;
  }
  void add(Resident*) {}
  void remove(Resident*) {}
  size_t move(WeightGroup, size_t) { return 0; }
};

#endif

OrtStatus* Resident::watch(const OrtApi* api, const OrtKernelInfo* info, size_t index, size_t element_bytes,
                           bool read_whole) {
  if (watched_group == 0) return nullptr;
  int is_constant = 0;
  const OrtValue* value = nullptr;
  if (OrtStatus* status = ort::constant_input(api, info, index, &is_constant, &value)) return status;
  if (is_constant == 0 || value == nullptr) return nullptr;
  OrtTensorTypeAndShapeInfo* shape = nullptr;
  if (OrtStatus* status = ort::type_and_shape(api, value, &shape)) return status;
  size_t elements = 0;
  OrtStatus* status = ort::element_count(api, shape, &elements);
  ort::release_shape(api, shape);
  void* data = nullptr;
  if (status == nullptr) status = ort::mutable_data(api, const_cast<OrtValue*>(value), &data);
  if (status != nullptr || data == nullptr) return status;
  group_ = watched_group;
  source_ = data;
  bytes_ = elements * element_bytes;
  read_whole_ = read_whole;
  Residents::instance().add(this);
  return nullptr;
}

Resident::~Resident() {
  if (source_ != nullptr) Residents::instance().remove(this);
}

WeightGroup begin_watching() {
  static std::atomic<WeightGroup> last{0};
  return watched_group = ++last;
}

void end_watching() { watched_group = 0; }

size_t move_residents(WeightGroup group, size_t enough) { return Residents::instance().move(group, enough); }

}  // namespace castline
