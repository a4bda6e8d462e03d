#pragma once

#include <cstddef>
#include <cstdint>

#include "dispatcher/hook/counters.h"
#include "dispatcher/hook/hook_slots.h"
#include "dispatcher/hook/operator_hook.h"
#include "dispatcher/hook/switches.h"
#include "guards/builder/call_sketch.h"

// Long runs of calls that are decided for native (long_run.h), where the operator has kernels for
// other calls: there is a run for each mark that the thread remembers (hook_slots.h), and one for
// each sketch, which tells more calls apart and costs more.
namespace eagercache {

// All below: any thread, each with runs of its own; lock-free but for a thread's first count.

// Whether a call was counted by count_of_sketch: only then need a sketch be made.
inline bool has_sketched_runs(const HookSlots& slots, std::uint32_t epoch) noexcept {
  return slots.sketched_epoch == epoch;
}
// Counts a call that was looked at as kNative, one more of its sketch's run.
void count_of_sketch(std::size_t hook, std::uint32_t epoch, std::uint64_t sketch) noexcept;
// True when the call need not be looked at; it is counted as kNative then.
bool passes_unseen_of_sketch(std::size_t hook, std::uint32_t epoch, std::uint64_t sketch) noexcept;
// A kernel answered a call of the sketch, which tells too little then: no run of it is ever long.
void bar_sketch(std::size_t hook, std::uint32_t epoch, std::uint64_t sketch) noexcept;

// The run that one call of a hook belongs to. `Arguments` are what sketch_call takes.
template <typename Arguments>
class RunOfCall {
 public:
  RunOfCall(OperatorHook& hook, const Arguments& arguments) noexcept
      : hook_(hook),
        arguments_(arguments),
        slots_(hook_slots(hook.index())),
        epoch_(native_run_epoch.load(std::memory_order_relaxed)) {}

  // Whether native answers without a look at the call, which is counted then. Not while kernels are
  // frozen: those that answer do so every time. `recent` is what is remembered of the call's mark,
  // null without any.
  bool passes(HookSlots::Recent* recent = nullptr) noexcept {
    if (recent == nullptr) {
      return passes_by_sketch();
    }
    if (recent->run.passes(epoch_) && !kernels_frozen.load()) [[unlikely]] {
      slots_.count(CallOutcome::kNative);
      return true;
    }
    return recent->run.is_barred() && !recent->answered && passes_by_sketch();
  }

  // Native answers after a look at the call: counts it.
  void count(HookSlots::Recent* recent = nullptr) noexcept {
    if (!is_sketched()) {
      count_native(hook_.index(), epoch_);
    } else if (recent != nullptr && !recent->run.is_barred()) {
      slots_.count(CallOutcome::kNative);
      recent->run.count(epoch_);
    } else {
      if (sketch_ == 0) {
        sketch_ = sketch_call(arguments_, hook_.device_type());
      }
      if (sketch_ != 0) {
        count_of_sketch(hook_.index(), epoch_, sketch_);
      } else {
        count_native(hook_.index(), epoch_);
      }
    }
  }

  // A kernel answered it.
  void bar(HookSlots::Recent* recent = nullptr) noexcept {
    if (recent != nullptr && !recent->answered) {
      recent->answered = true;
      recent->run.bar(epoch_);
    }
    if (sketch_ != 0) [[unlikely]] {
      bar_sketch(hook_.index(), epoch_, sketch_);
    }
  }

  // The thread's own of the hook.
  HookSlots& slots() const noexcept { return slots_; }

 private:
  bool passes_by_sketch() noexcept {
    if (!has_sketched_runs(slots_, epoch_)) [[likely]] {
      return false;
    }
    if (!is_sketched() || kernels_frozen.load()) {
      return false;
    }
    sketch_ = sketch_call(arguments_, hook_.device_type());
    return sketch_ != 0 && passes_unseen_of_sketch(hook_.index(), epoch_, sketch_);
  }

  // Of an operator without kernels all calls are one run.
  bool is_sketched() const noexcept {
    return epoch_ != 0 && (hook_.table().has_kernels() || hook_.classes().has_kernels() ||
                           hook_.scalars().has_kernels());
  }

  OperatorHook& hook_;
  const Arguments& arguments_;
  HookSlots& slots_;
  const std::uint32_t epoch_;
  std::uint64_t sketch_ = 0;
};

}  // namespace eagercache
