#pragma once

#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "dispatcher/hook/counters.h"
#include "guards/key/call_key.h"

// Who looks at the calls of hooks. Hooks know these three interfaces and nothing of what implements
// them; where nobody looks, a call costs one load each.
namespace eagercache {

class OperatorHook;

// Takes calls of one thread that native is to answer: a probe or an explainer.
class CallTaker {
 public:
  // The thread's taker that waits for a call of `hook` just now (of several, the one attached
  // last), or nullptr. One thread-local read where the thread has none.
  static CallTaker* waiting_for(const OperatorHook& hook) noexcept {
    return first_ == nullptr ? nullptr : find(hook);
  }
  // The call on top of `stack`. True when the taker has answered it; else native is to.
  virtual bool take_call(OperatorHook& hook, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack) = 0;

 protected:
  ~CallTaker() = default;
  virtual bool waits_for(const OperatorHook& hook) const noexcept = 0;

  // To the calling thread, until detach(). Another thread's detach() does nothing.
  void attach() noexcept;
  void detach() noexcept;

 private:
  static CallTaker* find(const OperatorHook& hook) noexcept;
  [[gnu::tls_model("initial-exec")]] static constinit thread_local CallTaker* first_;

  CallTaker* next_ = nullptr;
};

// Is told of every call of a hook, whatever answered it. Lives as long as the process; any
// thread.
class CallRecorder {
 public:
  // `native_ns` is what native took, 0 when not timed.
  virtual void record(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                      CallOutcome outcome, std::uint64_t native_ns) noexcept = 0;
  // The same of a call that has no key, by rule; native answered it.
  virtual void record_aside(OperatorHook& hook, AsideReason reason,
                            std::uint64_t native_ns) noexcept = 0;
  // Whether the hook should time the native call that it is about to make.
  virtual bool wants_time() noexcept = 0;

 protected:
  ~CallRecorder() = default;
};
// Null where no calls are recorded.
inline std::atomic<CallRecorder*> call_recorder{nullptr};

// Compares kernels' answers with native's. Lives as long as the process; any thread.
class AnswerVerifier {
 public:
  // Whether this call is to be compared.
  virtual bool chooses() noexcept = 0;
  // How the last `count` values of two stacks differ, in a few words; empty where they agree. May
  // throw what ATen throws.
  virtual std::string difference(const torch::jit::Stack& kernel, const torch::jit::Stack& native,
                                 std::size_t count) = 0;

 protected:
  ~AnswerVerifier() = default;
};
// Null where no answers are compared.
inline std::atomic<AnswerVerifier*> answer_verifier{nullptr};

}  // namespace eagercache
