#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dispatcher/base/policy.h"
#include "dispatcher/hook/call_trials.h"
#include "dispatcher/hook/integer_samples.h"
#include "guards/table/guard_table.h"

namespace eagercache {

class OperatorHook;

// Where a hook goes with a call that its table does not decide, and with a kernel that did wrong.
// The runtime is one. Lives as long as the process; any thread. No hit comes here.
class MissQueue {
 public:
  virtual OnMiss on_miss() const noexcept = 0;
  // What of the policy is part of an entry's key in the store.
  virtual std::string policy_tag() const = 0;

  // For a key that is new in this process: the kernel of its shape class, when one admits it; the
  // key then is an entry like any other. On the caller's thread; reads no file.
  virtual Found find_in_class(OperatorHook& hook, std::span<const Word> words,
                              std::uint64_t hash) = 0;
  // Asks the store for the key and installs the verdict; on the caller's thread.
  virtual Found load_now(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash) = 0;

  // What note_missed_call() is to do about a call: nothing, ask the store, or have a kernel
  // compiled that the store does not have.
  enum class Ask { kNothing, kStore, kCompile };
  virtual Ask ask_for(const OperatorHook& hook, const MissNote& note) const noexcept = 0;
  // After native answered a missed call: queues what the policy asks for; waits under kWait.
  // `native_ns` is what native took for this call, `integers` what its integer tensors held, where
  // a kernel may be compiled for it.
  virtual void note_missed_call(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                                const MissNote& note, std::uint64_t native_ns,
                                std::vector<IntegerSample> integers) = 0;

  // A kernel reported an error: the key goes native for this process, one warning.
  virtual void note_kernel_failure(OperatorHook& hook, std::span<const Word> words) = 0;
  // A kernel's answer differed from native's: the entry is quarantined, the key goes native for
  // this process, one warning.
  virtual void note_wrong_answer(OperatorHook& hook, std::span<const Word> words,
                                 const std::string& difference) = 0;
  // In the program's own calls native is faster than the key's kernel: it answers from now on.
  virtual void note_lost_trial(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                               const TrialTimes& times) = 0;

 protected:
  ~MissQueue() = default;
};

}  // namespace eagercache
