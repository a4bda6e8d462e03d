// The unboxed form of a call: what OperatorHook::call does for a boxed one, without the boxes.

#include <c10/util/SmallVector.h>

#include <algorithm>

#include "dispatcher/hook/call_observer.h"
#include "dispatcher/hook/counters.h"
#include "dispatcher/hook/hook_slots.h"
#include "dispatcher/hook/operator_hook.h"
#include "dispatcher/hook/sketched_runs.h"
#include "dispatcher/hook/unboxed_hooks.h"
#include "dispatcher/operators/version_counter.h"
#include "guards/base/left_out.h"
#include "guards/builder/call_sketch.h"

namespace eagercache {
namespace {

bool verification_is_on() noexcept {
  return answer_verifier.load(std::memory_order_relaxed) != nullptr;
}

void move_version_of(const UnboxedArguments& arguments, std::size_t index) {
  if (arguments.kinds[index] == UnboxedKind::kTensor) {
    move_version(arguments.at<at::Tensor>(index));
  } else if (arguments.kinds[index] == UnboxedKind::kTensorList) {
    for (const at::Tensor& tensor : arguments.at<at::TensorList>(index)) {
      move_version(tensor);
    }
  } else if (arguments.kinds[index] == UnboxedKind::kOptionalTensor) {
    if (const auto& tensor = arguments.at<std::optional<at::Tensor>>(index)) {
      move_version(*tensor);
    }
  }
}

// Whoever is not decided ends the runs of those that are.
void count_pending(HookSlots& slots, HookSlots::Recent& recent) noexcept {
  slots.count(CallOutcome::kPending);
  slots.run.end();
  recent.run.end();
}

}  // namespace

Route OperatorHook::begin_unboxed(const UnboxedArguments& arguments, UnboxedOutputs outputs) {
  if (!hooks_answer.load(std::memory_order_relaxed) || !active()) [[unlikely]] {
    return CallTaker::waiting_for(*this) != nullptr ? Route::kBoxed : Route::kNative;
  }
  if (InsideGuard::active() && !left_out("check", "re_entrancy")) {
    return CallTaker::waiting_for(*this) != nullptr ? Route::kBoxed : Route::kNative;
  }
  if (call_recorder.load(std::memory_order_relaxed) != nullptr) [[unlikely]] {
    return Route::kBoxed;
  }
  if (passes_on()) {
    return Route::kNative;
  }
  RunOfCall run(*this, arguments);
  HookSlots& mine = run.slots();
  const std::uint64_t mark = mark_of_call(arguments);
  HookSlots::Recent* const recent = mine.find_recent(mark);
  if (run.passes(recent)) {
    return Route::kNative;
  }
  if (const AsideReason reason = thread_reason(); reason != AsideReason::kNone) [[unlikely]] {
    count_aside(index_, reason);
    return Route::kNative;
  }
  // Most calls have a key that the thread has met among its last ones.
  if (recent != nullptr && !verification_is_on()) [[likely]] {
    CallTensors call;
    const Found found = table_.find_again(recent->key, [&](std::span<const Word> words) noexcept {
      return has_key(eligibility_.plan, arguments, device_type_, words, call);
    });
    // A call that may be timed is looked up, for the words of its key.
    const bool answers = found.state == EntryState::kKernel && !mine.trial_due();
    if (answers) [[likely]] {
      auto& kernel = *static_cast<LoadedKernel*>(const_cast<void*>(found.kernel));
      const LoadedKernel::Outcome outcome = run_unboxed(kernel, arguments, call, outputs);
      if (outcome == LoadedKernel::Outcome::kAnswered) [[likely]] {
        mine.count(CallOutcome::kHit);
        run.bar(recent);
        return Route::kAnswered;
      }
      if (outcome == LoadedKernel::Outcome::kFailed) {
        note_failure(kernel, arguments);
      }
    }
    if (answers || found.state == EntryState::kNative) {
      recent->answered = false;
      run.count(recent);
      return Route::kNative;
    }
    if (found.state == EntryState::kPending && scalars_.empty() && passes_pending(recent->key)) {
      count_pending(mine, *recent);
      return Route::kNative;
    }
  }
  return look_up_unboxed(arguments, outputs, run, mark);
}

Route OperatorHook::look_up_unboxed(const UnboxedArguments& arguments, UnboxedOutputs outputs,
                                    RunOfCall<UnboxedArguments>& run, std::uint64_t mark) {
  CallView view;
  if (const AsideReason reason = build_key(eligibility_.plan, arguments, device_type_, view);
      reason != AsideReason::kNone) {
    count_aside(index_, reason);
    return Route::kNative;
  }
  RememberedKey key;
  const std::uint64_t hash = hash_words(view.key.words());
  const Found found = table_.find(view.key.words(), hash, &key);
  if (found.state != EntryState::kAbsent) {
    run.slots().remember(mark, key);
  }
  if (found.state == EntryState::kKernel) [[likely]] {
    auto& kernel = *static_cast<LoadedKernel*>(const_cast<void*>(found.kernel));
    if (verification_is_on() && !kernel.writes_inputs()) [[unlikely]] {
      return Route::kBoxed;  // which draws, once
    }
    const TrialTurn turn = begin_trial(run.slots(), view.key.words(), hash);
    if (is_natives(turn)) [[unlikely]] {
      run.slots().count(CallOutcome::kNative);
      return turn == TrialTurn::kNative ? Route::kTimed : Route::kNative;
    }
    const std::uint64_t began = turn == TrialTurn::kKernel ? trial_clock() : 0;
    const LoadedKernel::Outcome outcome = run_unboxed(kernel, arguments, view, outputs);
    if (outcome == LoadedKernel::Outcome::kAnswered) [[likely]] {
      if (turn == TrialTurn::kKernel) [[unlikely]] {
        end_trial(view.key.words(), hash, turn, trial_clock() - began);
      }
      run.slots().count(CallOutcome::kHit);
      run.bar(run.slots().find_recent(mark));
      return Route::kAnswered;
    }
    if (outcome == LoadedKernel::Outcome::kFailed) {
      note_failure(kernel, view.key.words());
    }
  } else if (found.state != EntryState::kNative) {
    const Route route =
        scalars_.empty() ? Route::kBoxed : answer_by_class(arguments, view, outputs);
    HookSlots::Recent* const recent = run.slots().find_recent(mark);
    if (route == Route::kBoxed && found.state == EntryState::kPending && recent != nullptr &&
        passes_pending(recent->key)) {
      count_pending(run.slots(), *recent);
      return Route::kNative;
    }
    if (route == Route::kBoxed) {
      end_native_run(index_);  // or the boxed hook might pass the call on
      if (recent != nullptr) {
        recent->run.end();
      }
    }
    if (route == Route::kAnswered) {
      run.bar(recent);
    }
    if (route != Route::kNative) {
      return route;
    }
  }
  run.count(run.slots().find_recent(mark));
  return Route::kNative;
}

bool OperatorHook::passes_pending(const RememberedKey& key) const noexcept {
  return !kernels_frozen.load(std::memory_order_relaxed) &&
         table_.note_again(key, [this](std::uint64_t calls) noexcept {
           const MissNote note{EntryState::kPending, nullptr, false, calls};
           return misses_.ask_for(*this, note) == MissQueue::Ask::kNothing;
         });
}

void OperatorHook::note_failure(LoadedKernel& kernel, const UnboxedArguments& arguments) {
  CallView view;
  // What a kernel writes is data: the call has the key that it had, whatever is said of it now.
  static_cast<void>(build_key(eligibility_.plan, arguments, device_type_, view));
  note_failure(kernel, view.key.words());
}

Route OperatorHook::answer_by_class(const UnboxedArguments& arguments, const CallView& view,
                                    UnboxedOutputs outputs) {
  ScalarClasses::Numbers numbers;
  const Found found = scalars_.find(view.key.words(), numbers);
  if (found.state != EntryState::kKernel) {
    return found.state == EntryState::kNative ? Route::kNative : Route::kBoxed;
  }
  ScalarKernel::WithScalars kernel(*static_cast<ScalarKernel*>(const_cast<void*>(found.kernel)),
                                   numbers.values());
  if (verification_is_on() && !kernel.writes_inputs()) [[unlikely]] {
    return Route::kBoxed;
  }
  const LoadedKernel::Outcome outcome = run_unboxed(kernel, arguments, view, outputs);
  if (outcome == LoadedKernel::Outcome::kAnswered) [[likely]] {
    count_call(index_, CallOutcome::kHit);
    return Route::kAnswered;
  }
  if (outcome == LoadedKernel::Outcome::kFailed) {
    note_failure(kernel, view.key.words());
  }
  return Route::kNative;
}

LoadedKernel::Outcome OperatorHook::run_unboxed(LoadedKernel& kernel,
                                                const UnboxedArguments& arguments,
                                                const CallTensors& call,
                                                UnboxedOutputs outputs) noexcept {
  try {
    if (outputs.list != nullptr) {
      outputs.list->resize(kernel.num_outputs());
      outputs.fixed = *outputs.list;
    } else if (kernel.num_outputs() != outputs.fixed.size()) [[unlikely]] {
      return LoadedKernel::Outcome::kNotStarted;
    }
    LoadedKernel::Outcome outcome = LoadedKernel::Outcome::kFailed;
    {
      const InsideGuard inside;
      outcome = kernel.answer(call.tensors.view(), outputs.fixed, call.device);
    }
    if (outcome != LoadedKernel::Outcome::kAnswered) [[unlikely]] {
      return outcome;
    }
    for_each_moved_version(effects(),
                           [&](std::size_t index) { move_version_of(arguments, index); });
    move_fresh_versions(effects(), outputs.fixed);
    return LoadedKernel::Outcome::kAnswered;
  } catch (...) {
    return LoadedKernel::Outcome::kFailed;
  }
}

const UnboxedMaker* find_unboxed(const OperatorHook& hook) {
  const std::span<const UnboxedRow> rows = unboxed_rows();
  const auto row =
      std::ranges::lower_bound(rows, std::string_view(hook.full_name()), {}, &UnboxedRow::name);
  if (row == rows.end() || row->name != hook.full_name()) {
    return nullptr;
  }
  const UnboxedMaker& maker = *row->maker;
  const std::vector<ArgumentReader>& readers = hook.plan().readers;
  const bool same = maker.kinds.size() == readers.size() &&
                    std::ranges::equal(maker.kinds, readers, fits) &&
                    maker.returns_list == hook.returns_list() &&
                    (maker.returns_list || maker.num_fresh == hook.num_fresh());
  return same ? &maker : nullptr;
}

}  // namespace eagercache
