#pragma once

#include <torch/library.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "dispatcher/autograd/function_autograd.h"
#include "dispatcher/base/locks.h"
#include "dispatcher/base/policy.h"
#include "dispatcher/hook/integer_samples.h"
#include "dispatcher/hook/miss_queue.h"
#include "dispatcher/hook/operator_hook.h"
#include "dispatcher/runtime/call_text.h"
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
  // Has all operators that are Python functions answered by these, those of later, too, until it is
  // called with false: their kernels call none of the operators that the functions name.
  void set_functions_aside(bool aside);
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

  void note_lost_trial(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                       const TrialTimes& times) noexcept override;

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
    Mutex mutex;
    std::condition_variable done_changed;
    bool done EAGERCACHE_GUARDED_BY(mutex) = false;
  };
  // A kernel of a class of calls: of which kind of class, and which of the class's kernels.
  struct ClassKernel {
    enum class Kind : std::uint8_t { kShapes, kScalars };
    Kind kind = Kind::kShapes;
    std::size_t number = 0;  // a scalar class has one kernel
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
    std::optional<ClassKernel> of_class;  // in flight for this kernel, not for one of its own
    std::string again;  // what is asked of the service for a key with a verdict (runtime_again.cc)
    std::optional<TrialTimes> lost;  // the store is to be told that its kernel loses here
    std::vector<std::shared_ptr<Ticket>> tickets;
  };

  Runtime();
  // Puts `kernel` in the place of what is there, for ever.
  void put_implementation(const c10::OperatorName& name, c10::DispatchKey key,
                          c10::KernelFunction kernel,
                          std::optional<c10::impl::CppSignature> signature)
      EAGERCACHE_REQUIRES(registry_mutex_);
  bool install_from_store(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                          const std::string& digest, Found* found);
  // The kernel of an entry, which may answer the key; else why none does.
  struct EntryKernel {
    LoadedKernel* kernel = nullptr;
    std::string decision{};        // "native" or "failed"
    std::string reason{};          // of that
    Status loaded = Status::ok();  // what came of loading its object, where that was tried
  };
  EntryKernel kernel_of(OperatorHook& hook, std::span<const Word> words, const Manifest& manifest);
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
  // What an entry of one key and those of its classes have in common; see runtime_install.cc.
  Result<Manifest> find_entry(const std::string& digest) const;
  void put_aside(const std::string& digest, const std::string& reason) const;
  // The way of a class's kernel, of either kind; see runtime_classes.cc.
  struct ClassVerdict {
    std::string
        decision;        // "kernel": it stands among the classes; "native" or "failed": it does not
    std::string reason;  // why not
  };
  std::string class_digest(const OperatorHook& hook, std::span<const Word> words,
                           const ClassKernel& of) const;
  bool ask_for_kernel_of(OperatorHook& hook, std::span<const Word> words, const ClassKernel& of);
  bool install_class(OperatorHook& hook, std::span<const Word> words, const ClassKernel& of,
                     const Manifest& manifest, const std::string& digest);
  static void note_class_unknown(OperatorHook& hook, std::span<const Word> words,
                                 const ClassKernel& of);
  static void close_class(OperatorHook& hook, std::span<const Word> words, const ClassKernel& of,
                          bool failed);
  void hand_over(Pending& pending, const ClassKernel& of, CallRequest request);
  void complete_class(Pending& pending, const std::string& digest, const std::string& decision,
                      const std::string& reason);
  void retire_classes(OperatorHook& hook, std::span<const Word> words, const std::string& reason);
  void queue_alone(Pending& pending);
  // What is the shape classes' own; see runtime_shapes.cc.
  bool has_classes(const OperatorHook& hook) const;
  void ask_for_class(OperatorHook& hook, std::span<const Word> words);
  ClassVerdict put_shapes(OperatorHook& hook, std::span<const Word> words, std::size_t number,
                          LoadedKernel* loaded, const Manifest& manifest);
  bool hand_to_class(Pending& pending);
  void answer_waiting_keys(OperatorHook& hook);
  std::optional<std::size_t> retire_shapes(OperatorHook& hook, std::span<const Word> words);
  // And the scalar classes'; see runtime_scalars.cc.
  bool has_scalar_classes(const OperatorHook& hook) const;
  bool ask_for_scalars(OperatorHook& hook, std::span<const Word> words);
  ClassVerdict put_scalars(OperatorHook& hook, std::span<const Word> words, LoadedKernel* loaded,
                           const Manifest& manifest);
  bool hand_to_scalars(Pending& pending);
  // Verdicts that noise hid, and kernels that may be bettered; see runtime_again.cc.
  void ask_again(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                 const Manifest& manifest);
  void submit_again(Pending pending);
  void complete_again(const std::string& digest);
  // A kernel that lost in the program's own calls; see runtime_trials.cc.
  void keep_lost_trial(const Pending& pending);
  void wait_for_verdict(MissHandler& handler, const std::shared_ptr<Ticket>& ticket);
  bool queue(Pending pending);
  void loader_loop();
  void process(Pending pending);
  bool join_in_flight(const std::string& digest, Pending& pending);
  void submit(Pending pending, CallRequest call);
  static void finish(Pending& pending);
  void before_fork_child();
  void stop_for_exit();

  std::atomic<bool> functions_aside_{false};
  mutable Mutex registry_mutex_;
  std::map<std::string, std::unique_ptr<OperatorHook>> hooks_
      EAGERCACHE_GUARDED_BY(registry_mutex_);
  std::vector<c10::RegistrationHandleRAII> registrations_ EAGERCACHE_GUARDED_BY(registry_mutex_);
  std::map<std::string, std::unique_ptr<FunctionAutograd>> autograd_
      EAGERCACHE_GUARDED_BY(registry_mutex_);
  std::shared_ptr<DiskStore> store_ EAGERCACHE_GUARDED_BY(registry_mutex_);
  std::shared_ptr<MissHandler> handler_ EAGERCACHE_GUARDED_BY(registry_mutex_);
  // By object, form and device.
  std::map<std::string, Loaded> loaded_ EAGERCACHE_GUARDED_BY(registry_mutex_);
  std::map<LoadedKernel*, LoadedKernel*> replica_kernels_ EAGERCACHE_GUARDED_BY(registry_mutex_);

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

  mutable Mutex queue_mutex_;
  std::condition_variable queue_changed_;
  std::deque<Pending> queue_ EAGERCACHE_GUARDED_BY(queue_mutex_);
  // By digest.
  std::unordered_map<std::string, Pending> in_flight_ EAGERCACHE_GUARDED_BY(queue_mutex_);
  // Asked for again, when the machine is idle; nobody waits for them. By digest.
  std::unordered_map<std::string, Pending> again_ EAGERCACHE_GUARDED_BY(queue_mutex_);
  std::size_t processing_ EAGERCACHE_GUARDED_BY(queue_mutex_) = 0;
  bool stopping_ EAGERCACHE_GUARDED_BY(queue_mutex_) = false;
  std::thread loader_ EAGERCACHE_GUARDED_BY(queue_mutex_);

  mutable Mutex verdicts_mutex_;
  // By hook, then digest.
  std::unordered_map<const OperatorHook*, std::map<std::string, VerdictRecord>> verdicts_
      EAGERCACHE_GUARDED_BY(verdicts_mutex_);
  std::size_t verdict_count_ EAGERCACHE_GUARDED_BY(verdicts_mutex_) = 0;
};

}  // namespace eagercache
