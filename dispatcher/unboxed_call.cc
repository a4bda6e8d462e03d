// The unboxed form of a call: what OperatorHook::call does for a boxed one, without the boxes.

#include <c10/util/SmallVector.h>

#include <algorithm>

#include "dispatcher/counters.h"
#include "dispatcher/explain.h"
#include "dispatcher/operator_hook.h"
#include "dispatcher/probe.h"
#include "dispatcher/recorder.h"
#include "dispatcher/runtime.h"
#include "dispatcher/sketched_runs.h"
#include "dispatcher/unboxed_hooks.h"
#include "dispatcher/verification.h"
#include "dispatcher/version_counter.h"
#include "guards/left_out.h"

namespace eagercache {
namespace {

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

}  // namespace

Route OperatorHook::begin_unboxed(const UnboxedArguments& arguments, UnboxedOutputs outputs) {
  if (!hooks_answer.load(std::memory_order_relaxed) || !active()) [[unlikely]] {
    const bool watched = Probe::armed_for(*this) != nullptr || Explainer::current() != nullptr;
    return watched ? Route::kBoxed : Route::kNative;
  }
  if (InsideGuard::active() && !left_out("check", "re_entrancy")) {
    return Explainer::current() != nullptr ? Route::kBoxed : Route::kNative;
  }
  if (recording_calls.load(std::memory_order_relaxed)) [[unlikely]] {
    return Route::kBoxed;
  }
  if (passes_on()) {
    return Route::kNative;
  }
  RunOfCall run(*this, arguments);
  if (run.passes()) {
    return Route::kNative;
  }
  if (const AsideReason reason = thread_reason(); reason != AsideReason::kNone) [[unlikely]] {
    count_aside(index_, reason);
    return Route::kNative;
  }
  CallView view;
  if (const AsideReason reason = build_key(eligibility_.plan, arguments, device_type_, view);
      reason != AsideReason::kNone) {
    count_aside(index_, reason);
    return Route::kNative;
  }
  const Found found = table_.find(view.key.words(), hash_words(view.key.words()));
  if (found.state == EntryState::kKernel) [[likely]] {
    auto& kernel = *static_cast<LoadedKernel*>(const_cast<void*>(found.kernel));
    if (verification_is_on() && !kernel.writes_inputs()) [[unlikely]] {
      return Route::kBoxed;  // which draws, once
    }
    const LoadedKernel::Outcome outcome = run_unboxed(kernel, arguments, view, outputs);
    if (outcome == LoadedKernel::Outcome::kAnswered) [[likely]] {
      count_call(index_, CallOutcome::kHit);
      run.bar();
      return Route::kAnswered;
    }
    if (outcome == LoadedKernel::Outcome::kFailed) {
      note_failure(kernel, view.key.words());
    }
  } else if (found.state != EntryState::kNative) {
    const Route route =
        scalars_.empty() ? Route::kBoxed : answer_by_class(arguments, view, outputs);
    if (route == Route::kBoxed) {
      end_native_run(index_);  // or the boxed hook might pass the call on
    }
    if (route == Route::kAnswered) {
      run.bar();
    }
    if (route != Route::kNative) {
      return route;
    }
  }
  run.count();
  return Route::kNative;
}

Route OperatorHook::answer_by_class(const UnboxedArguments& arguments, const CallView& view,
                                    UnboxedOutputs outputs) {
  ScalarClasses::Numbers numbers;
  const Found found = scalars_.find(view.key.words(), numbers);
  if (found.state != EntryState::kKernel) {
    return found.state == EntryState::kNative ? Route::kNative : Route::kBoxed;
  }
  BareKernel::WithScalars kernel(*static_cast<BareKernel*>(const_cast<void*>(found.kernel)),
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
                                                const CallView& view,
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
      outcome = kernel.answer(view.tensors.view(), outputs.fixed, view.device);
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
