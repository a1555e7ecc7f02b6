#include "sampling_threads.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace castline {
namespace {

// What is to be done in one call. Whoever takes a number below count runs that piece.
struct Job {
  int64_t count;
  const std::function<void(int64_t)>& work;
  std::atomic<int64_t> next{0};

  void run() {
    for (int64_t i = next++; i < count; i = next++) work(i);
  }
};

class Team {
 public:
  void run(Job& job, int helpers) {
    const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn) return job.run();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      grow(helpers);
      job_ = &job;
      places_ = helpers;
    }
    wake_.notify_all();
    job.run();
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;  // who has not begun need not be waited for
    done_.wait(lock, [&] { return working_ == 0; });
  }

 private:
  void grow(int helpers) {
    try {
      while (size_ < helpers) {
        std::thread([this] { help(); }).detach();
        ++size_;
      }
    } catch (const std::system_error&) {  // as many as there may be
    }
  }

  [[noreturn]] void help() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return job_ != nullptr && places_ > 0; });
      Job& job = *job_;
      --places_;
      ++working_;
      lock.unlock();
      job.run();
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  std::mutex turn_;   // of the call that has the helpers
  std::mutex mutex_;  // of what follows
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int places_ = 0, working_ = 0, size_ = 0;
};

// Never destroyed: its threads may sleep in it while the process ends.
std::atomic<Team*> team{nullptr};

Team& the_team() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { team = nullptr; });  // a child has no threads of it
  (void)registered;
  Team* found = team;
  if (found == nullptr) {
    Team* const made = new Team;
    if (team.compare_exchange_strong(found, made)) return *made;
    delete made;
  }
  return *found;
}

}  // namespace

void share_out(int64_t count, int helpers, const std::function<void(int64_t)>& work) {
  Job job{count, work};
  if (helpers > 0 && count > 1) {
    the_team().run(job, helpers);
  } else {
    job.run();
  }
}

}  // namespace castline
