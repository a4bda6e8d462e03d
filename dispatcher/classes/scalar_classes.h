#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "dispatcher/base/locks.h"
#include "dispatcher/kernels/loaded_kernel.h"
#include "guards/key/scalar_class.h"
#include "guards/table/guard_table.h"
#include "guards/table/table_budget.h"

namespace eagercache {

// The scalar classes of one operator (guards/key/scalar_class.h): their kernels, and what leads to
// one. A class has at most one kernel, which takes the numbers as arguments.
class ScalarClasses {
 public:
  static constexpr std::size_t kMaxClasses = 512;
  // A class is compiled at so many values: with fewer a kernel for each is quicker to have, and
  // faster.
  static constexpr std::size_t kEnoughValues = 3;

  // The numbers of one call. Uninitialised at first: on the path of a call.
  class Numbers {
   public:
    std::span<const double> values() const noexcept { return {values_.data(), count_}; }

   private:
    friend class ScalarClasses;
    std::array<double, kMaxScalars> values_;
    std::size_t count_ = 0;
  };

  // --- any thread; no lock, no allocation ---
  // kKernel: that ScalarKernel answers the call, with `numbers`. kNative: the class's kernel was
  // measured not to be faster. kAbsent otherwise.
  Found find(std::span<const Word> words, Numbers& numbers) const noexcept;
  // Whether any class was given a kernel since the last clear().
  bool has_kernels() const noexcept { return table_.has_kernels(); }
  // Whether find() finds nothing, whatever it is asked.
  bool empty() const noexcept { return empty_.load(std::memory_order_relaxed); }

  // --- the rest takes the lock; `words` are a call's key ---
  enum class Step : std::uint8_t {
    kNothing,   // the call has no class, or there is nothing to do for it (yet)
    kAsk,       // ask the store; then put(), put_native() or note_unknown()
    kCompile,   // have it compiled, once; then put(), put_native() or close()
    kUnderWay,  // being compiled
  };
  // What is to be done for the class of a call that find() has nothing for. Counts `calls` of it;
  // kCompile once the class has met `enough` calls and values.
  Step next_step(std::span<const Word> words, std::uint64_t calls, std::uint64_t enough);
  // The verdict. `kernel` lives for ever.
  void put(std::span<const Word> words, ScalarKernel* kernel);
  void put_native(std::span<const Word> words);
  void note_unknown(std::span<const Word> words);
  // There is to be no kernel of the class: each call is on its own.
  void close(std::span<const Word> words);
  // Takes away the class's kernel; native answers its calls. Whether there was one.
  bool retire(std::span<const Word> words);
  // Forgets all. Kernels stay loaded.
  void clear();

 private:
  struct Class {
    enum class State : std::uint8_t { kNew, kUnknown, kCompiling, kDecided };
    State state = State::kNew;
    std::uint64_t calls = 0;
    std::vector<std::vector<double>> values;  // met, up to kEnoughValues
  };

  // Not the budget of all tables: a class that were forgotten would be compiled anew.
  TableBudget budget_{kMaxClasses, std::size_t{16} << 20};
  GuardTable table_{kMaxClasses, budget_};  // class words to ScalarKernel
  std::atomic<bool> empty_{true};
  Mutex mutex_;
  std::map<std::vector<Word>, Class> classes_ EAGERCACHE_GUARDED_BY(mutex_);
};

// The class words of a call; empty when it has no class.
std::vector<Word> scalar_class_of(std::span<const Word> words);

}  // namespace eagercache
