#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "dispatcher/base/locks.h"
#include "dispatcher/kernels/shape_kernel.h"
#include "guards/key/shape_class.h"
#include "guards/table/guard_table.h"
#include "guards/table/table_budget.h"

namespace eagercache {

// The shape classes of one operator: their kernels, and what leads to one.
//
// A class has up to kMaxKernels kernels, numbered in the order in which they were made; in the
// store each has a key of its own. The first one takes as arguments the sizes that have been seen
// to change, a later one is made for calls that the earlier ones do not cover.
class ShapeClasses {
 public:
  static constexpr std::size_t kMaxKernels = 4;
  static constexpr std::size_t kMaxClasses = 512;

  // --- any thread; no lock, no allocation ---
  // kKernel: that kernel answers the call. kNative: one could, but was measured not to be faster
  // for its size. kAbsent otherwise.
  Found find(std::span<const Word> words) const noexcept;
  // Whether any class was given a kernel since the last clear().
  bool has_kernels() const noexcept { return table_.has_kernels(); }

  // --- the rest takes the lock ---
  // The number of the next kernel to ask the store for, of the class that `words` are a member of;
  // nothing when they have no class, or the store has been asked for all that there may be.
  std::optional<std::size_t> unasked(std::span<const Word> words);
  // Answers to the same: the kernel of that number (`answers` runs it, perhaps through a wrapper;
  // both live for ever), that the store has none of it, or that there is to be none.
  void put(std::span<const Word> words, std::size_t number, const ShapeKernel* kernel,
           LoadedKernel* answers);
  void note_unknown(std::span<const Word> words, std::size_t number);
  // `failed`: a kernel was made and was not native's equal, or would not be made at all.
  void close(std::span<const Word> words, bool failed = false);
  // Whether the class was closed so: kernels for exact sizes are likely to fail, too.
  bool failed(std::span<const Word> words);

  // A kernel that is to be compiled.
  struct Proposal {
    std::size_t number = 0;
    ShapePattern pattern;
  };
  // Counts `calls` of a key that find() has nothing for. A proposal once the class has met at least
  // `enough` calls and another size; then nothing more until put(), note_unknown() or close().
  std::optional<Proposal> note_call(std::span<const Word> words, std::uint64_t calls,
                                    std::uint64_t enough);

  // Whether a key of a class whose kernel lost, or failed, gets one of its own after `calls` of it:
  // the first one after `enough`, each further one after twice as many. Counts those that do.
  bool lets_alone(std::span<const Word> words, std::uint64_t calls, std::uint64_t enough);

  // The number of the kernel that was proposed for the class and is not there yet.
  std::optional<std::size_t> under_way(std::span<const Word> words);

  // Takes away the kernel that answers the call, and closes its class. Its number, if there was
  // one.
  std::optional<std::size_t> retire(std::span<const Word> words);
  // Forgets all. Kernels stay loaded.
  void clear();

 private:
  struct Kernel {
    const ShapeKernel* shape = nullptr;
    LoadedKernel* answers = nullptr;
  };
  // Never freed once find() may see it.
  struct Class {
    std::array<std::atomic<const Kernel*>, kMaxKernels> kernels{};
    // Guarded by mutex_.
    std::size_t asked = 0;  // kernels below this number are known
    bool asked_all = false;
    bool closed = false;
    bool failed = false;
    bool compiling = false;
    std::uint64_t calls = 0;
    unsigned alone = 0;                      // keys that were let have a kernel of their own
    std::vector<std::vector<Word>> members;  // a few, none of which a kernel answers
  };

  Class* class_of_locked(std::span<const Word> words, bool make) EAGERCACHE_REQUIRES(mutex_);

  // Not the budget of all tables: a class that were forgotten would be compiled anew.
  TableBudget budget_{kMaxClasses, std::size_t{16} << 20};
  GuardTable table_{kMaxClasses, budget_};  // class words to Class
  Mutex mutex_;
  std::map<std::vector<Word>, std::unique_ptr<Class>> classes_ EAGERCACHE_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<const Kernel>> kernels_ EAGERCACHE_GUARDED_BY(mutex_);  // only grows
};

}  // namespace eagercache
