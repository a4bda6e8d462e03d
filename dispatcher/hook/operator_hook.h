#pragma once

// What PyTorch's dispatcher calls in native's place. The runtime owns the hooks and never destroys
// one: the dispatcher, and threads inside a call, hold plain pointers to them.

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "dispatcher/base/locks.h"
#include "dispatcher/classes/scalar_classes.h"
#include "dispatcher/classes/shape_classes.h"
#include "dispatcher/hook/call_trials.h"
#include "dispatcher/hook/counters.h"
#include "dispatcher/hook/hook_slots.h"
#include "dispatcher/hook/inside_guard.h"
#include "dispatcher/hook/miss_queue.h"
#include "dispatcher/hook/switches.h"
#include "dispatcher/kernels/loaded_kernel.h"
#include "dispatcher/operators/eligibility.h"
#include "guards/builder/key_builder.h"
#include "guards/builder/unboxed_key.h"
#include "guards/table/guard_table.h"
#include "kernel_cache/base/digest.h"

namespace eagercache {

template <typename Arguments>
class RunOfCall;

// Where an unboxed call goes on after the hook has looked at it.
enum class Route {
  kAnswered,  // a kernel answered; the outputs are there
  kNative,    // counted; the displaced native kernel answers
  kTimed,     // the same, and it is timed: a NativeTrial was begun
  kBoxed,     // not counted: OperatorHook::call does what is left (a miss, an explainer, a probe)
};

// Room for the tensors that a kernel makes.
struct UnboxedOutputs {
  std::span<at::Tensor> fixed;              // as many as the signature returns by value
  std::vector<at::Tensor>* list = nullptr;  // or a list of any length
};

// One hooked operator at one backend key: the displaced native kernel, the plan of its arguments,
// its table of keys. Created once, registered once, never destroyed. All methods may be called from
// any thread, with or without the GIL.
class OperatorHook {
 public:
  // `index` is below kMaxHooks and unique. Copies the kernel that is at `key` now. `misses` lives
  // for ever.
  OperatorHook(const c10::OperatorHandle& op, c10::DispatchKey key, Eligibility eligibility,
               std::size_t index, MissQueue& misses);
  OperatorHook(const OperatorHook&) = delete;
  OperatorHook& operator=(const OperatorHook&) = delete;

  // The boxed kernel: steps 1 to 3 of "What happens to a call?" in dispatcher/README.md. Takes the
  // operator's arguments off `stack` and leaves its results. Throws only what native throws, but
  // for one case: when a kernel that writes arguments fails, they may be half written, and native
  // must not run.
  void call(c10::DispatchKeySet keys, torch::jit::Stack* stack);

  // Steps 1 to 3 of a call that comes unboxed, but for those that are rare. `arguments` are the
  // operator's own, and `outputs` what its signature returns by value. Throws as call() does.
  Route begin_unboxed(const UnboxedArguments& arguments, UnboxedOutputs outputs);
  // What the unboxed hook calls for the other two routes.
  const c10::KernelFunction& native_kernel() const noexcept { return native_; }
  const c10::KernelFunction& boxed_kernel() const noexcept { return boxed_; }  // call(), that is
  // Whether native runs with hooks below it disabled.
  bool guards_native() const noexcept { return guard_native_; }
  // The argument that return `index` hands back.
  std::size_t returned_argument(std::size_t index) const noexcept {
    return eligibility_.returned_arguments[index];
  }
  // The number of returns that are no arguments.
  std::size_t num_fresh() const noexcept { return num_fresh_; }
  bool returns_list() const noexcept { return eligibility_.returns_list; }

  // A call of a trial took so long (call_trials.h).
  void end_trial(std::span<const Word> words, std::uint64_t hash, TrialTurn turn,
                 std::uint64_t nanoseconds) noexcept;

  // The displaced native kernel, with hooks below it disabled.
  void call_native(c10::DispatchKeySet keys, torch::jit::Stack* stack);

  // Reads the call on top of `stack` (left alone). kNone when `view` holds its key.
  AsideReason read_call(const torch::jit::Stack& stack, CallView& view) const noexcept;

  // Runs `kernel` on the call that `view` was read from, replaces the arguments by the results on
  // success, and leaves the stack alone otherwise. Arguments that the operator returns are the very
  // objects. kFailed also when something went wrong after the kernel answered; native must not run
  // then if the kernel writes.
  LoadedKernel::Outcome call_kernel(LoadedKernel& kernel, const CallView& view,
                                    torch::jit::Stack* stack) noexcept;

  // For an operator that is a Python function: a digest of the function's code, which becomes part
  // of every entry's key in the store. Empty for all others.
  void set_identity(std::string identity);
  std::string identity() const;
  // Whether set_identity was called.
  bool is_function() const noexcept { return is_function_.load(std::memory_order_relaxed); }

  // The device that a key's tensors are on, or are made on where there are none.
  c10::Device device_of(std::span<const Word> words) const;
  // The entry's key in the store: operator, schema, the function's identity if it has one, dispatch
  // key (with the GPU's architecture), choice policy and persistent words.
  Digest entry_digest(std::span<const Word> words, std::string_view policy_tag) const;

  // True when somebody registered over us since; that kernel, not ours, is called by now.
  bool is_shadowed() const;

  const c10::OperatorHandle& op() const noexcept { return op_; }
  const std::string& name() const noexcept { return name_; }          // "aten::var"
  const std::string& overload() const noexcept { return overload_; }  // "correction", or ""
  // "aten::var.correction"
  const std::string& full_name() const noexcept { return full_name_; }
  c10::DispatchKey dispatch_key() const noexcept { return key_; }
  const ArgumentPlan& plan() const noexcept { return eligibility_.plan; }
  std::size_t num_returns() const noexcept { return eligibility_.num_returns; }
  // Whether this very call of the operator writes an argument ("training" may be off).
  bool writes_in(const DecodedCall& call) const;
  // Whether what it writes are running statistics of the process's own data, which no replica has
  // to hold with the same bits: they may be as accurate as an output. On CUDA only, as in
  // `writes_statistics` of validate.py.
  bool writes_statistics() const noexcept;
  // Whether a kernel that makes so many tensors can answer.
  bool takes_outputs(std::size_t count) const noexcept {
    return eligibility_.returns_list ? count != 0 : count == num_fresh_;
  }
  std::size_t index() const noexcept { return index_; }
  c10::DeviceType device_type() const noexcept { return device_type_; }
  GuardTable& table() noexcept { return table_; }
  const GuardTable& table() const noexcept { return table_; }
  // How many times as many calls as one of a usual kernel a compile here is worth: a power of two.
  std::uint64_t compile_cost() const noexcept {
    return compile_cost_.load(std::memory_order_relaxed);
  }
  // What compiling one of this operator's keys took; 0 is no news.
  void note_compile_cost(double cpu_seconds) noexcept;
  ShapeClasses& classes() noexcept { return classes_; }
  ScalarClasses& scalars() noexcept { return scalars_; }
  const OperatorEffects& effects() const noexcept { return eligibility_.effects; }

  // Whether this operator is among those asked for. Inactive hooks go straight to native,
  // uncounted. So do those that are aside.
  bool active() const noexcept { return active_.load(std::memory_order_relaxed); }
  void set_active(bool active) noexcept;
  bool wanted() const noexcept { return wanted_.load(std::memory_order_relaxed); }
  // Takes the operator out of kernels' hands for a while, whether it is asked for or not.
  void set_aside(bool aside) noexcept;

  // Remembers what the registry holds right after our registration; see is_shadowed.
  void note_registered();

 private:
  void answer(c10::DispatchKeySet keys, torch::jit::Stack* stack);
  // Native answers a call that no kernel may, unless somebody on this thread takes it.
  void answer_natively(c10::DispatchKeySet keys, torch::jit::Stack* stack);
  // Whether native answers without a look at the call, which is counted then: no kernel is known,
  // and this is one of a long run of calls that were decided for native.
  bool passes_on() const noexcept;
  // Why no kernel may answer on this thread; kNone otherwise.
  AsideReason thread_reason() const noexcept;
  // Remembers a kernel's error; throws where native must not run after it.
  void note_failure(LoadedKernel& kernel, std::span<const Word> words);
  void note_failure(LoadedKernel& kernel, const UnboxedArguments& arguments);
  // The rest of begin_unboxed for a call whose key, if it has one, the thread has not met lately.
  [[gnu::noinline]] Route look_up_unboxed(const UnboxedArguments& arguments, UnboxedOutputs outputs,
                                          RunOfCall<UnboxedArguments>& run, std::uint64_t mark);
  // The turn of a call that a kernel would answer, where one is due; a NativeTrial is begun for
  // native's.
  TrialTurn begin_trial(HookSlots& mine, std::span<const Word> words, std::uint64_t hash) noexcept;
  // Whether a call of that pending key needs nothing but native's answer; the table counts it then.
  bool passes_pending(const RememberedKey& key) const noexcept;
  LoadedKernel::Outcome run_unboxed(LoadedKernel& kernel, const UnboxedArguments& arguments,
                                    const CallTensors& call, UnboxedOutputs outputs) noexcept;
  // Enters a missed call's key into the table, with what is known of it without native's answer:
  // the kernel of its shape class, or what the store has where the policy waits for that.
  MissNote enter_key(std::span<const Word> words, std::uint64_t hash);
  void answer_miss(CallView& view, std::uint64_t hash, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack);
  // Counts a call that a kernel answered, and records it while calls are recorded.
  void count(const CallView& view, std::uint64_t hash, CallOutcome outcome) noexcept;
  // Native answers a call that steps aside by rule; counts, and records as answer_decided does.
  void answer_aside(AsideReason reason, c10::DispatchKeySet keys, torch::jit::Stack* stack);
  // Native answers a call that is decided; counts, and records with native's time now and then.
  void answer_decided(const CallView& view, std::uint64_t hash, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack);
  // call_native, and the nanoseconds that it took on this thread.
  std::uint64_t time_native(c10::DispatchKeySet keys, torch::jit::Stack* stack);
  // What of that tells about the operator: on CUDA nothing, since native returns before it is done.
  std::uint64_t recorded_time(std::uint64_t native_ns) const noexcept;
  // Whether native's results, on top of `stack`, have more elements than 31 bits count.
  bool returned_large(const torch::jit::Stack& stack) const noexcept;
  // A hit that native computes too; native's answer stands when they differ.
  void answer_verified(const void* kernel, const CallView& view, std::uint64_t hash,
                       c10::DispatchKeySet keys, torch::jit::Stack* stack);
  bool answer_by_kernel(const void* kernel, const CallView& view, torch::jit::Stack* stack);
  // A call without an entry of its own, where its scalar class has a verdict; false where it has
  // none.
  bool answer_by_class(const CallView& view, std::uint64_t hash, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack);
  // The same for an unboxed call. kBoxed where the boxed form is to look at it.
  Route answer_by_class(const UnboxedArguments& arguments, const CallView& view,
                        UnboxedOutputs outputs);
  // The results of a call out of what the kernel made and of what it was given.
  void put_results(std::span<at::Tensor> outputs, torch::jit::Stack* stack) const;
  std::span<const c10::IValue> arguments(const torch::jit::Stack& stack) const noexcept;

  const c10::OperatorHandle op_;
  const c10::DispatchKey key_;
  const c10::DeviceType device_type_;
  const Eligibility eligibility_;
  const std::size_t num_fresh_;  // returns that are no arguments
  const std::size_t index_;
  MissQueue& misses_;
  const std::string name_;
  const std::string overload_;
  const std::string full_name_;
  const std::string schema_text_;
  const bool guard_native_;  // operators of ATen: what they call below is theirs
  const c10::KernelFunction native_;
  const c10::KernelFunction boxed_;
  c10::KernelFunction registered_;   // written once by note_registered, before the hook is active
  std::atomic<bool> active_{false};  // wanted_ and not aside_
  std::atomic<bool> wanted_{false};
  std::atomic<bool> aside_{false};
  std::atomic<bool> is_function_{false};
  mutable Mutex identity_mutex_;
  std::string identity_ EAGERCACHE_GUARDED_BY(identity_mutex_);
  std::atomic<std::uint64_t> compile_cost_{1};
  GuardTable table_;
  ShapeClasses classes_;
  ScalarClasses scalars_;
};

}  // namespace eagercache
