// OperatorHook: the way of a call, from the dispatcher's stack to a kernel's or native's answer on
// it.

#include <ATen/Parallel.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <chrono>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/hook/call_observer.h"
#include "dispatcher/hook/counters.h"
#include "dispatcher/hook/integer_samples.h"
#include "dispatcher/hook/operator_hook.h"
#include "dispatcher/hook/sketched_runs.h"
#include "dispatcher/hook/thread_state.h"
#include "dispatcher/operators/version_counter.h"
#include "guards/base/left_out.h"

namespace eagercache {
namespace {

// Tries to enter a key under contention; each gives the processor away once.
constexpr int kNoteAttempts = 1000;

// Tables hold the pointers that the miss queue installed: LoadedKernels, as const void* to keep the
// guards layer free of torch.
LoadedKernel& loaded_kernel(const void* kernel) {
  return *static_cast<LoadedKernel*>(const_cast<void*>(kernel));
}

// Native has nothing to compare with once the kernel has written its arguments.
bool writes_inputs(const void* kernel) { return loaded_kernel(kernel).writes_inputs(); }

// Whether this call's answer is to be compared with native's.
bool is_verified() noexcept {
  AnswerVerifier* const verifier = answer_verifier.load(std::memory_order_relaxed);
  return verifier != nullptr && verifier->chooses();
}

void move_version_of(const c10::IValue& value) {
  if (value.isTensorList()) {
    for (const c10::IValue& element : value.toListRef()) {
      move_version_of(element);
    }
  } else if (value.isTensor()) {
    move_version(value.toTensor());
  }
}

}  // namespace

constinit thread_local int InsideGuard::depth_ = 0;

std::span<const c10::IValue> OperatorHook::arguments(
    const torch::jit::Stack& stack) const noexcept {
  // A boxed stack may hold more values below this operator's own.
  const std::size_t count = eligibility_.plan.readers.size();
  return {stack.data() + (stack.size() - count), count};
}

void OperatorHook::call(c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (hooks_answer.load(std::memory_order_relaxed) && active()) [[likely]] {
    answer(keys, stack);
    return;
  }
  answer_natively(keys, stack);
}

void OperatorHook::answer_natively(c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  CallTaker* const taker = CallTaker::waiting_for(*this);
  if (taker == nullptr || !taker->take_call(*this, keys, stack)) [[likely]] {
    call_native(keys, stack);
  }
}

void OperatorHook::call_native(c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (guard_native_) {
    InsideGuard inside;
    native_.callBoxed(op_, keys, stack);
  } else {
    // A custom operator's own function may be many operators in Python; those are hooked as ever.
    native_.callBoxed(op_, keys, stack);
  }
}

bool OperatorHook::passes_on() const noexcept {
  return !table_.has_kernels() && !classes_.has_kernels() && !scalars_.has_kernels() &&
         call_recorder.load(std::memory_order_relaxed) == nullptr &&
         passes_unseen(index_, native_run_epoch.load(std::memory_order_relaxed));
}

AsideReason OperatorHook::thread_reason() const noexcept {
  if (const AsideReason reason = thread_state_reason(); reason != AsideReason::kNone) {
    return reason;
  }
  if (device_type_ == c10::DeviceType::CPU && at::in_parallel_region() &&
      applies(AsideReason::kParallelRegion)) [[unlikely]] {
    return AsideReason::kParallelRegion;
  }
  return AsideReason::kNone;
}

AsideReason OperatorHook::read_call(const torch::jit::Stack& stack, CallView& view) const noexcept {
  if (const AsideReason reason = thread_reason(); reason != AsideReason::kNone) {
    return reason;
  }
  return build_key(eligibility_.plan, arguments(stack), device_type_, view);
}

void OperatorHook::answer(c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (InsideGuard::active() && !left_out("check", "re_entrancy")) {
    answer_natively(keys, stack);
    return;
  }
  if (passes_on()) {
    call_native(keys, stack);
    return;
  }
  const std::span<const c10::IValue> own = arguments(*stack);
  RunOfCall run(*this, own);
  if (call_recorder.load(std::memory_order_relaxed) == nullptr && run.passes()) {
    call_native(keys, stack);
    return;
  }
  CallView view;
  if (const AsideReason reason = read_call(*stack, view); reason != AsideReason::kNone) {
    answer_aside(reason, keys, stack);
    return;
  }
  const std::uint64_t hash = hash_words(view.key.words());
  const Found found = table_.find(view.key.words(), hash);
  if (found.state == EntryState::kKernel) [[likely]] {
    if (is_verified() && !writes_inputs(found.kernel)) [[unlikely]] {
      answer_verified(found.kernel, view, hash, keys, stack);
      return;
    }
    const TrialTurn turn = begin_trial(run.slots(), view.key.words(), hash);
    if (is_natives(turn)) [[unlikely]] {
      run.slots().count(CallOutcome::kNative);
      const NativeTrial trial(turn == TrialTurn::kNative);
      call_native(keys, stack);
      return;
    }
    const std::uint64_t began = turn == TrialTurn::kKernel ? trial_clock() : 0;
    if (answer_by_kernel(found.kernel, view, stack)) [[likely]] {
      if (turn == TrialTurn::kKernel) [[unlikely]] {
        end_trial(view.key.words(), hash, turn, trial_clock() - began);
      }
      count(view, hash, CallOutcome::kHit);
      run.bar();
      return;
    }
  } else if (found.state != EntryState::kNative) {
    answer_miss(view, hash, keys, stack);
    return;
  }
  answer_decided(view, hash, keys, stack);
}

void OperatorHook::count(const CallView& view, std::uint64_t hash, CallOutcome outcome) noexcept {
  count_call(index_, outcome);
  if (CallRecorder* const recorder = call_recorder.load(std::memory_order_relaxed)) [[unlikely]] {
    recorder->record(*this, view.key.words(), hash, outcome, 0);
  }
}

void OperatorHook::answer_aside(AsideReason reason, c10::DispatchKeySet keys,
                                torch::jit::Stack* stack) {
  count_aside(index_, reason);
  CallRecorder* const recorder = call_recorder.load(std::memory_order_relaxed);
  if (recorder == nullptr) [[likely]] {
    call_native(keys, stack);
    return;
  }
  std::uint64_t native_ns = 0;
  // What a custom operator calls is recorded itself.
  if (guard_native_ && recorder->wants_time()) {
    native_ns = recorded_time(time_native(keys, stack));
  } else {
    call_native(keys, stack);
  }
  recorder->record_aside(*this, reason, native_ns);
}

void OperatorHook::answer_decided(const CallView& view, std::uint64_t hash,
                                  c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const std::span<const c10::IValue> own = arguments(*stack);
  RunOfCall(*this, own).count();
  CallRecorder* const recorder = call_recorder.load(std::memory_order_relaxed);
  if (recorder == nullptr) [[likely]] {
    call_native(keys, stack);
    return;
  }
  if (!recorder->wants_time()) {
    call_native(keys, stack);
    recorder->record(*this, view.key.words(), hash, CallOutcome::kNative, 0);
    return;
  }
  const std::uint64_t native_ns = time_native(keys, stack);
  recorder->record(*this, view.key.words(), hash, CallOutcome::kNative, recorded_time(native_ns));
}

std::uint64_t OperatorHook::time_native(c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto begin = std::chrono::steady_clock::now();
  call_native(keys, stack);
  return static_cast<std::uint64_t>((std::chrono::steady_clock::now() - begin).count());
}

std::uint64_t OperatorHook::recorded_time(std::uint64_t native_ns) const noexcept {
  return device_type_ == c10::DeviceType::CPU ? native_ns : 0;
}

MissNote OperatorHook::enter_key(std::span<const Word> words, std::uint64_t hash) {
  const bool waits = misses_.on_miss() != OnMiss::kBackground;
  MissNote note = table_.note_miss(words, hash);
  // The table does not wait for its lock and may leave a new key out; who asked to wait tries
  // again.
  for (int i = 0; note.calls == 0 && waits && i < kNoteAttempts; ++i) {
    std::this_thread::yield();
    note = table_.note_miss(words, hash);
  }
  if (note.inserted) {
    const Found found = misses_.find_in_class(*this, words, hash);
    note.state = found.state == EntryState::kKernel ? found.state : note.state;
    note.kernel = found.kernel;
  }
  if (note.inserted && note.state == EntryState::kPending && waits) {
    // The caller pays the first load of an entry that the local store has; never a compile.
    const Found found = misses_.load_now(*this, words, hash);
    note.state = found.state;
    note.kernel = found.kernel;
  }
  return note;
}

void OperatorHook::answer_miss(CallView& view, std::uint64_t hash, c10::DispatchKeySet keys,
                               torch::jit::Stack* stack) {
  if (!scalars_.empty() && answer_by_class(view, hash, keys, stack)) {
    return;
  }
  end_native_run(index_);
  // Nothing is loaded or compiled on behalf of a call that a graph records.
  if (kernels_frozen.load() || is_capturing(view.device)) {
    // Not entered into the table, so that it is a miss like any other afterwards.
    answer_decided(view, hash, keys, stack);
    return;
  }
  const MissNote note = enter_key(view.key.words(), hash);
  if (note.state == EntryState::kKernel && answer_by_kernel(note.kernel, view, stack)) {
    count(view, hash, CallOutcome::kHit);
    return;
  }
  if (note.state == EntryState::kKernel || note.state == EntryState::kNative) {
    answer_decided(view, hash, keys, stack);
    return;
  }
  const CallOutcome outcome = note.inserted ? CallOutcome::kMiss : CallOutcome::kPending;
  count_call(index_, outcome);
  // Native first: a key goes to the store and the compiler only after native has answered it. If it
  // throws, the call was wrong and nothing happened.
  if (left_out("check", "native_first")) {
    misses_.note_missed_call(*this, view.key.words(), hash, note, 0, {});
  }
  // What native is given, before it may have changed it.
  std::vector<IntegerSample> integers;
  if (misses_.ask_for(*this, note) == MissQueue::Ask::kCompile) {
    integers = sample_integers(view.tensors.view());
  }
  const std::uint64_t native_ns = time_native(keys, stack);
  if (CallRecorder* const recorder = call_recorder.load(std::memory_order_relaxed)) [[unlikely]] {
    recorder->record(*this, view.key.words(), hash, outcome, recorded_time(native_ns));
  }
  if (returned_large(*stack) && !left_out("check", "large_result")) [[unlikely]] {
    // Small operands may broadcast to more than 31 bits count.
    table_.set_native(view.key.words(), hash);
    return;
  }
  misses_.note_missed_call(*this, view.key.words(), hash, note, native_ns, std::move(integers));
}

bool OperatorHook::answer_by_class(const CallView& view, std::uint64_t hash,
                                   c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  ScalarClasses::Numbers numbers;
  const Found found = scalars_.find(view.key.words(), numbers);
  if (found.state == EntryState::kAbsent) {
    return false;
  }
  if (found.state == EntryState::kKernel) {
    ScalarKernel::WithScalars kernel(*static_cast<ScalarKernel*>(const_cast<void*>(found.kernel)),
                                     numbers.values());
    const void* const answers = static_cast<LoadedKernel*>(&kernel);
    if (is_verified() && !kernel.writes_inputs()) [[unlikely]] {
      answer_verified(answers, view, hash, keys, stack);
      return true;
    }
    if (answer_by_kernel(answers, view, stack)) [[likely]] {
      count(view, hash, CallOutcome::kHit);
      return true;
    }
  }
  answer_decided(view, hash, keys, stack);
  return true;
}

bool OperatorHook::answer_by_kernel(const void* kernel, const CallView& view,
                                    torch::jit::Stack* stack) {
  LoadedKernel& loaded = loaded_kernel(kernel);
  const LoadedKernel::Outcome outcome = call_kernel(loaded, view, stack);
  if (outcome == LoadedKernel::Outcome::kFailed) [[unlikely]] {
    note_failure(loaded, view.key.words());
  }
  return outcome == LoadedKernel::Outcome::kAnswered;
}

void OperatorHook::note_failure(LoadedKernel& kernel, std::span<const Word> words) {
  misses_.note_kernel_failure(*this, words);
  TORCH_CHECK(!kernel.writes_inputs(), "eagercache: a kernel for ", full_name_, " (entry ",
              entry_digest(words, misses_.policy_tag()).hex(),
              ") failed after it may have written its arguments; their contents are undefined. "
              "Native answers such calls from now on.");
}

void OperatorHook::answer_verified(const void* kernel, const CallView& view, std::uint64_t hash,
                                   c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const std::span<const c10::IValue> own = arguments(*stack);
  torch::jit::Stack native(own.begin(), own.end());
  // The call's own arguments go with the kernel's answer.
  const std::vector<Word> words(view.key.words().begin(), view.key.words().end());
  const bool answered = answer_by_kernel(kernel, view, stack);
  if (!answered) {
    answer_decided(view, hash, keys, stack);
    return;
  }
  count(view, hash, CallOutcome::kHit);
  call_native(keys, &native);
  std::string difference;
  try {
    const InsideGuard inside;
    if (AnswerVerifier* const verifier = answer_verifier.load(std::memory_order_relaxed)) {
      difference = verifier->difference(*stack, native, num_returns());
    }
  } catch (const std::exception&) {
    return;  // out of memory: nothing is known
  }
  if (!difference.empty()) {
    misses_.note_wrong_answer(*this, words, difference);
    torch::jit::drop(*stack, num_returns());
    stack->insert(stack->end(), native.begin(), native.end());
  }
}

LoadedKernel::Outcome OperatorHook::call_kernel(LoadedKernel& kernel, const CallView& view,
                                                torch::jit::Stack* stack) noexcept {
  try {
    c10::SmallVector<at::Tensor, 4> outputs(kernel.num_outputs());
    {
      InsideGuard inside;
      // A function's casts are in its kernel, whatever PyTorch's operators are called from there.
      std::optional<c10::impl::ExcludeDispatchKeyGuard> below_autocast;
      if (plan().reads_autocast) {
        below_autocast.emplace(c10::autocast_dispatch_keyset);
      }
      const LoadedKernel::Outcome outcome =
          kernel.answer(view.tensors.view(), {outputs.data(), outputs.size()}, view.device);
      if (outcome != LoadedKernel::Outcome::kAnswered) [[unlikely]] {
        return outcome;
      }
    }
    for_each_moved_version(effects(),
                           [&](std::size_t index) { move_version_of(arguments(*stack)[index]); });
    move_fresh_versions(effects(), {outputs.data(), outputs.size()});
    // `view` points into the stack, so it may move only now.
    put_results({outputs.data(), outputs.size()}, stack);
    return LoadedKernel::Outcome::kAnswered;
  } catch (...) {
    return LoadedKernel::Outcome::kFailed;
  }
}

}  // namespace eagercache
