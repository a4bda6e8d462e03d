#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kernel_cache/base/digest.h"
#include "kernel_cache/files/file_lock.h"
#include "kernel_cache/store/store_tree.h"

namespace eagercache {

// Who is about to run code for the first time. Each process keeps one record: a file that it holds
// locked while it lives, with a line for the beginning and one for the end of every attempt. A
// record whose lock is free and that has an attempt without an end is a dead process's accusation.
//
// Thread-safe. Written by plain appends, never flushed: a process's death loses nothing of them.
class AttemptLog {
 public:
  explicit AttemptLog(StoreTree& tree) : tree_(tree) {}
  // Removes this process's record, unless an attempt has no end yet.
  ~AttemptLog();
  AttemptLog(const AttemptLog&) = delete;
  AttemptLog& operator=(const AttemptLog&) = delete;

  // Makes this process's record where it has none; note() does nothing before. A failure is of no
  // interest: then this process accuses nobody.
  void open();

  // One write(2). Does nothing in a forked child.
  void note(const Digest& key, bool begins) noexcept;

  // How many dead processes' records accuse `key`. Removes records of the dead that accuse nobody.
  std::size_t deaths(const Digest& key) const;
  // Removes the records of the dead that accuse `key`.
  void forget(const Digest& key) const;
  // Removes records of the dead that are older than a week. Returns how many.
  std::uint64_t sweep() const;

 private:
  struct Record;
  std::shared_ptr<Record> record() const noexcept;
  template <typename Visit>
  void visit_dead(Visit visit) const;
  bool remove(const std::string& name) const;

  StoreTree& tree_;
  std::shared_ptr<Record> record_;  // guarded by process_mutex()
};

}  // namespace eagercache
