#pragma once

#include <torch/library.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "dispatcher/autograd/function_autograd.h"
#include "dispatcher/base/policy.h"
#include "dispatcher/hook/integer_samples.h"
#include "dispatcher/hook/miss_queue.h"
#include "dispatcher/hook/operator_hook.h"
#include "dispatcher/runtime/miss_handler.h"
#include "kernel_cache/base/status.h"
#include "kernel_cache/store/disk_store.h"

namespace eagercache {

// What this process knows of one key's verdict, for people.
struct VerdictRecord {
  std::string digest;
  std::string call_json;
  std::string decision;                      // "kernel", "native" or "failed"
  std::string reason;                        // why not a kernel; empty for kernels
  std::map<std::string, std::string> facts;  // the manifest's
};

// Of that, what counters and estimates need: cheap to copy, whatever a call's text and facts are.
struct VerdictOutcome {
  std::string digest;
  std::string decision;
  double native_ns = 0;  // of one call, as the manifest has it; 0 where it was not timed
  double kernel_ns = 0;
};

// Everything process-wide: the hooks, the policy, the store, the loader thread and the compile
// service's plug. One leaked object: threads may be inside hooks while static objects are
// destroyed.
//
// Locks, in the order in which they may nest: registry_mutex_ alone; queue_mutex_ alone;
// verdicts_mutex_ alone. None is held while files are read, a kernel is loaded, a handler runs or
// native is called.
class Runtime final : public MissQueue {
 public:
  static Runtime& instance();

  // Hooks an operator at a backend key ("CPU", "CUDA"), once; later calls return the same hook. The
  // hook starts inactive. kInvalidArgument for an unknown operator or key, kUnsupported with the
  // reason for one that cannot be hooked.
  Result<OperatorHook*> register_operator(const std::string& name, const std::string& overload,
                                          const std::string& dispatch_key);
  // Gives a hooked operator that is a Python function the digest of its code. Where it had another
  // one, the verdicts of that are forgotten, and kernels under way for it are not installed.
  void set_identity(OperatorHook& hook, const std::string& identity);
  // Lets a function answer calls that need gradients: registers over the kernel that is at the
  // autograd key of `dispatch_key` ("CPU", "CUDA"). Both operators must be hooked there. Once for
  // each operator and key; see function_autograd.h.
  Status register_autograd(const std::string& name, const std::string& dispatch_key,
                           const std::string& backward);
  // The hook, or nullptr.
  OperatorHook* find_hook(const std::string& name, const std::string& overload,
                          const std::string& dispatch_key) const;
  std::vector<OperatorHook*> hooks() const;

  // Replaces the policy; every table forgets its verdicts (kernels stay loaded, the store is asked
  // again), so that nothing answers under a policy that did not choose it.
  void set_policy(const Policy& policy);
  // Another number after each change of policy or of a function's code.
  std::uint64_t generation() const noexcept {
    return verdict_generation.load(std::memory_order_relaxed);
  }
  Policy policy() const noexcept { return policy_.load(std::memory_order_relaxed); }
  // How long a call waits for its kernel under kWait; then it goes on with native's answer, and
  // until some key has a verdict no other call waits at all.
  void set_wait_seconds(double seconds) noexcept { wait_seconds_.store(seconds); }

  // nullptr: no store, every key stays native.
  void set_store(std::shared_ptr<DiskStore> store);
  std::shared_ptr<DiskStore> store() const;
  void set_handler(std::shared_ptr<MissHandler> handler);

  // No kernel becomes an answer once this has returned, in any thread; those that are answers go
  // on, and keys without a verdict stay native and are not compiled. Waits for an install under
  // way, not for compiles. thaw() ends it.
  void freeze() noexcept;
  void thaw() noexcept { kernels_frozen.store(false); }
  bool frozen() const noexcept { return kernels_frozen.load(); }

  // Turns answering on or off for the process. In a forked child it stays off: returns false.
  bool set_answering(bool answering);
  bool forked() const noexcept { return forked_.load(std::memory_order_relaxed); }

  // --- called by hooks ---
  OnMiss on_miss() const noexcept override { return policy().on_miss; }
  std::string policy_tag() const override;
  Found find_in_class(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash) override;
  Found load_now(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash) override;
  Ask ask_for(const OperatorHook& hook, const MissNote& note) const noexcept override;
  void note_missed_call(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                        const MissNote& note, std::uint64_t native_ns,
                        std::vector<IntegerSample> integers) override;
  void note_kernel_failure(OperatorHook& hook, std::span<const Word> words) override;
  void note_wrong_answer(OperatorHook& hook, std::span<const Word> words,
                         const std::string& difference) override;

  // --- called by the compile service ---
  // The service is done with a key: the store is asked again and the verdict installed. When the
  // store has nothing, the key stays native in this process, for `reason`. `cpu_seconds` is what it
  // took: the operator's next keys wait for more calls where that is much.
  void complete(const std::string& digest, const std::string& decision, const std::string& reason,
                double cpu_seconds = 0);

  // How often a key is met before a kernel is asked for, at the least.
  std::uint64_t calls_before_compile(const OperatorHook& hook) const noexcept;

  // Verdicts of one hook met so far.
  std::vector<VerdictRecord> verdicts(const OperatorHook& hook) const;
  // The same in short. verdicts() copies texts and facts with the lock held that the loader's
  // thread waits for to install the next kernel; this one does not.
  std::vector<VerdictOutcome> outcomes(const OperatorHook& hook) const;
  // Keys queued for the loader or given to the compile service.
  std::size_t outstanding() const;
  // Waits until outstanding() is 0 or `seconds` passed (negative: for ever). True when drained.
  bool wait_until_idle(double seconds);

  // Stops the loader thread and forgets the handler; hooks go native. For process exit.
  void shut_down();
  // For programs that may end without shut_down(): from now on exit() waits, for some seconds at
  // most, until no thread is reading, hashing or loading a kernel, and none begins. Not for
  // processes in which a handler may wait for a lock of the exiting thread (an interpreter's).
  void stop_at_exit();

 private:
  struct Ticket {
    std::mutex mutex;
    std::condition_variable done_changed;
    bool done = false;  // guarded by mutex
  };
  // A key on its way to a verdict.
  struct Pending {
    OperatorHook* hook = nullptr;
    std::vector<Word> words;
    std::uint64_t hash = 0;
    std::uint64_t calls = 0;
    std::uint64_t native_ns = 0;   // of one of them
    std::uint64_t generation = 0;  // of the policy under which it was queued
    bool may_compile = false;
    std::vector<IntegerSample> integers;  // of the call that may be compiled
    // In flight for a kernel of the key's shape class, and for which of them.
    std::optional<std::size_t> class_number;
    bool scalars = false;  // in flight for the kernel of the key's scalar class
    std::string again;  // what is asked of the service for a key with a verdict (runtime_again.cc)
    std::vector<std::shared_ptr<Ticket>> tickets;
  };

  Runtime();
  // Puts `kernel` in the place of what is there, for ever. Needs registry_mutex_.
  void put_implementation(const c10::OperatorName& name, c10::DispatchKey key,
                          c10::KernelFunction kernel,
                          std::optional<c10::impl::CppSignature> signature);
  bool install_from_store(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                          const std::string& digest, Found* found);
  Found install(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                const Manifest& manifest);
  bool put_kernel(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                  const void* kernel);
  // `put`, which puts a kernel into a table, unless frozen; whether it did.
  bool put_unless_frozen(const std::function<void()>& put);
  // A kernel that entries share, and what its objects say they were made for (plans/contract.h).
  struct Loaded {
    LoadedKernel* kernel = nullptr;
    std::string made_for;
  };
  std::optional<Loaded> find_loaded(const std::string& identity) const;
  Result<LoadedKernel*> load_kernel(OperatorHook& hook, std::span<const Word> words,
                                    const Manifest& manifest);
  std::string rejected_by_policy(const OperatorHook& hook, std::span<const Word> words,
                                 const Manifest& manifest) const;
  LoadedKernel* for_replicas(LoadedKernel* kernel, const Manifest& manifest);
  void install_native(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                      const std::string& decision, const std::string& reason,
                      const std::map<std::string, std::string>& facts);
  void record(OperatorHook& hook, std::span<const Word> words, VerdictRecord record);
  // How many calls of a key, of which native takes `native_ns` each, are worth a kernel now; see
  // runtime_budget.cc.
  std::uint64_t enough_calls(const OperatorHook& hook, std::uint64_t native_ns) const;
  // Shape classes; see runtime_shapes.cc.
  bool has_classes(const OperatorHook& hook) const;
  std::string class_digest(const OperatorHook& hook, std::span<const Word> words,
                           std::size_t number) const;
  void ask_for_class(OperatorHook& hook, std::span<const Word> words);
  bool install_class(OperatorHook& hook, std::span<const Word> words, std::size_t number,
                     const Manifest& manifest, const std::string& digest);
  bool hand_to_class(Pending& pending);
  void complete_class(Pending& pending, const std::string& digest, const std::string& decision,
                      const std::string& reason);
  void answer_waiting_keys(OperatorHook& hook);
  void retire_class_kernel(OperatorHook& hook, std::span<const Word> words,
                           const std::string& reason);
  void queue_alone(Pending& pending);
  // What the kernels of classes and of single keys have in common; see runtime_install.cc.
  Result<Manifest> find_entry(const std::string& digest) const;
  void put_aside(const std::string& digest, const std::string& reason) const;
  bool join_in_flight(const std::string& digest, Pending& pending);
  // Scalar classes; see runtime_scalars.cc.
  bool has_scalar_classes(const OperatorHook& hook) const;
  std::string scalar_digest(const OperatorHook& hook, std::span<const Word> words) const;
  bool ask_for_scalars(OperatorHook& hook, std::span<const Word> words);
  bool install_scalars(OperatorHook& hook, std::span<const Word> words, const Manifest& manifest,
                       const std::string& digest);
  bool hand_to_scalars(Pending& pending);
  void complete_scalars(Pending& pending, const std::string& digest, const std::string& decision,
                        const std::string& reason);
  void retire_scalars(OperatorHook& hook, std::span<const Word> words, const std::string& reason);
  // Verdicts that noise hid, and kernels that may be bettered; see runtime_again.cc.
  void ask_again(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                 const Manifest& manifest);
  void submit_again(Pending pending);
  void complete_again(const std::string& digest);
  void wait_for_verdict(MissHandler& handler, const std::shared_ptr<Ticket>& ticket);
  void loader_loop();
  void process(Pending pending);
  void submit(Pending pending, const CompileRequest& request);
  static void finish(Pending& pending);
  void before_fork_child();
  void stop_for_exit();

  mutable std::mutex registry_mutex_;
  std::map<std::string, std::unique_ptr<OperatorHook>> hooks_;         // guarded by registry_mutex_
  std::vector<c10::RegistrationHandleRAII> registrations_;             // guarded by registry_mutex_
  std::map<std::string, std::unique_ptr<FunctionAutograd>> autograd_;  // guarded by registry_mutex_
  std::shared_ptr<DiskStore> store_;                                   // guarded by registry_mutex_
  std::shared_ptr<MissHandler> handler_;                               // guarded by registry_mutex_
  std::map<std::string, Loaded> loaded_;  // by object, form and device; guarded by registry_mutex_
  std::map<LoadedKernel*, LoadedKernel*> replica_kernels_;  // guarded by registry_mutex_

  std::atomic<Policy> policy_;  // read by every miss
  static_assert(std::atomic<Policy>::is_always_lock_free);
  std::atomic<std::uint64_t> requests_{0};  // for kernels, since the policy was set
  std::atomic<double> wait_seconds_{600.0};
  std::atomic<bool> waited_in_vain_{false};  // since the latest verdict
  std::atomic<bool> forked_{false};
  // freeze() sets kernels_frozen and waits for this to be 0; put_kernel() counts itself in and then
  // looks. Sequentially consistent, so that one of the two sees the other.
  std::atomic<int> installing_{0};
  // Likewise: stop_for_exit() sets the one and waits for the other, which counts the callers that
  // use the store.
  std::atomic<bool> exiting_{false};
  std::atomic<int> asking_{0};

  mutable std::mutex queue_mutex_;
  std::condition_variable queue_changed_;
  std::deque<Pending> queue_;                           // guarded by queue_mutex_
  std::unordered_map<std::string, Pending> in_flight_;  // by digest; guarded by queue_mutex_
  // Asked for again, when the machine is idle; nobody waits for them. By digest; guarded by
  // queue_mutex_.
  std::unordered_map<std::string, Pending> again_;
  std::size_t processing_ = 0;  // guarded by queue_mutex_
  bool stopping_ = false;       // guarded by queue_mutex_
  std::thread loader_;          // guarded by queue_mutex_

  mutable std::mutex verdicts_mutex_;
  // By hook, then digest; guarded by verdicts_mutex_.
  std::unordered_map<const OperatorHook*, std::map<std::string, VerdictRecord>> verdicts_;
  std::size_t verdict_count_ = 0;  // guarded by verdicts_mutex_
};

}  // namespace eagercache
