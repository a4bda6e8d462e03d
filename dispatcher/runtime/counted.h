#pragma once

#include <atomic>

namespace eagercache {

// Counts the threads that are within a block, for those who wait until none is.
class Counted {
 public:
  explicit Counted(std::atomic<int>& count) : count_(count) { count_.fetch_add(1); }
  ~Counted() { count_.fetch_sub(1); }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  std::atomic<int>& count_;
};

}  // namespace eagercache
