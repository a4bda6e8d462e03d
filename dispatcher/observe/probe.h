#pragma once

#include <ATen/core/stack.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dispatcher/hook/call_observer.h"
#include "dispatcher/hook/operator_hook.h"
#include "dispatcher/kernels/loaded_kernel.h"
#include "dispatcher/observe/rehearsal.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// The worker's instrument: takes a real call of a hooked operator, as the dispatcher hands it over,
// and lets a kernel that is not in any table answer it or be timed against native. Used by a
// process in which hooks do not answer otherwise. Bound to the thread that made it; a new one takes
// the place of the thread's last, which knows no call any more. (In Python that may lie about until
// the collector comes: Inductor's exceptions hold the frames below which it ran.)
class Probe final : private CallTaker {
 public:
  // Lets a probe go from any thread, as Python's collector does: on another thread than its own it
  // is left to that one, which destroys it when it makes its next probe.
  struct Deleter {
    void operator()(Probe* probe) const;
  };
  using Owned = std::unique_ptr<Probe, Deleter>;
  static Owned make(OperatorHook& hook);

  ~Probe();
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  // The next call on this thread is answered natively; its arguments and key are kept.
  void arm_capture();
  // The next call on this thread whose key equals the captured one is answered by the loaded
  // kernel. Requires a captured call and a kernel.
  void arm_force();

  // Arguments that the calls taken from now on hold as undefined tensors where Python, which has
  // none, passes None. Indices into the schema's arguments; others are ignored.
  void set_undefined(std::vector<std::size_t> arguments) { undefined_ = std::move(arguments); }

  bool captured() const noexcept { return captured_; }
  bool forced() const noexcept { return forced_; }
  AsideReason aside() const noexcept { return aside_; }
  const std::string& error() const noexcept { return error_; }
  // The first warning of native while it answered the captured call; empty for none.
  const std::string& warning() const noexcept { return warning_; }
  // The captured call's entry digest under `policy_tag`. Requires captured() and no aside reason.
  std::string digest(std::string_view policy_tag) const;

  // Loads a kernel from a file that the caller trusts (it has just compiled it): a bare one when
  // there is a launch plan, else a container, whose outputs get the strides of the captured call's
  // native ones, if there is one.
  Status load(const std::string& path, const std::string& launch_plan);
  // Loads a CUDA kernel's cubins, given as bytes, on the captured call's device. Requires a
  // captured call.
  Status load_cubins(const std::vector<std::string>& objects, const std::string& launch_plan);

  // Times the captured call, in pairs of (native, hit) means of `calls` calls each, in nanoseconds.
  // Both are boxed calls below autograd; a hit is the whole path: state checks, key, look-up,
  // kernel. What is written is a copy, with the same values each time. Throws what native throws,
  // and std::logic_error without a captured call that has a key.
  std::vector<std::pair<double, double>> time(std::size_t pairs, std::size_t calls);

 private:
  enum class Mode : std::uint8_t { kIdle, kCapture, kForce };

  explicit Probe(OperatorHook& hook);

  // Armed, and hooks do not answer otherwise.
  bool waits_for(const OperatorHook& hook) const noexcept override;
  bool take_call(OperatorHook& hook, c10::DispatchKeySet keys, torch::jit::Stack* stack) override;
  void capture(c10::DispatchKeySet keys, torch::jit::Stack* stack);
  // Lets go of the captured call.
  void retire() noexcept;
  double mean_ns(std::size_t calls, bool hit);
  // The kernel answers the call, with the call's own numbers where it takes some.
  LoadedKernel::Outcome run_kernel(const CallView& view, torch::jit::Stack* stack);
  // The same on the whole path of a hit, `table` in the place of the hook's; false where the kernel
  // did not answer.
  bool hit(const GuardTable& table, torch::jit::Stack* stack);
  void take_kernel(std::unique_ptr<LoadedKernel> kernel);

  OperatorHook& hook_;
  const std::thread::id thread_ = std::this_thread::get_id();
  Mode mode_ = Mode::kIdle;
  bool captured_ = false;
  bool forced_ = false;
  AsideReason aside_ = AsideReason::kNone;
  std::string error_;
  std::string warning_;
  torch::jit::Stack stack_;  // the captured call's arguments
  std::vector<Word> words_;  // and its key
  std::vector<std::size_t> undefined_;
  std::vector<std::vector<std::int64_t>> output_strides_;  // what native gave
  std::unique_ptr<LoadedKernel> kernel_;
  ScalarKernel* scalar_kernel_ = nullptr;  // the same, where it takes numbers
  std::unique_ptr<Rehearsal> rehearsal_;   // of the captured call; made when it is first timed
};

}  // namespace eagercache
