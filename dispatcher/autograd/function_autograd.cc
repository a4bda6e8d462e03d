#include "dispatcher/autograd/function_autograd.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dispatcher/autograd/autograd_node.h"
#include "dispatcher/base/locks.h"
#include "dispatcher/hook/thread_state.h"
#include "guards/builder/torch_compat.h"

namespace eagercache {
namespace {

using torch::autograd::variable_list;

// How often a backward call is looked up to see who answers it.
constexpr std::uint64_t kLookEvery = 8;

template <typename Predicate>
bool any_tensor(std::span<const c10::IValue> values, const Predicate& predicate) {
  return std::ranges::any_of(values, [&predicate](const c10::IValue& value) {
    if (value.isTensor()) {
      return value.toTensor().defined() && predicate(value.toTensor());
    }
    if (!value.isTensorList() && !value.isList()) {
      return false;
    }
    return std::ranges::any_of(value.toListRef(), [&predicate](const c10::IValue& element) {
      return element.isTensor() && element.toTensor().defined() && predicate(element.toTensor());
    });
  });
}

bool needs_gradient(const at::Tensor& tensor) { return tensor.requires_grad(); }

bool has_tangent(const at::Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); }

bool is_traced(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

bool is_wrapped_by_functorch(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has_any(c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched}));
}

bool has_only_tensors(const c10::FunctionSchema& schema) {
  const auto is_list = [](const c10::Argument& argument) {
    const c10::TypePtr type = argument.real_type();
    return type->kind() == c10::TypeKind::ListType && type->containedTypeSize() == 1 &&
           type->containedType(0)->isSubtypeOf(*c10::OptionalType::ofTensor());
  };
  return std::ranges::none_of(schema.arguments(), is_list) &&
         std::ranges::all_of(schema.returns(), [](const c10::Argument& result) {
           return result.real_type()->kind() == c10::TypeKind::TensorType;
         });
}

// Not zero, which stands for no key.
std::uint64_t remembered(std::uint64_t hash) {
  return (hash ^ (verdict_generation.load(std::memory_order_relaxed) * 0x9E3779B97F4A7C15U)) | 1U;
}

}  // namespace

AutocastState AutocastState::of_thread(c10::DeviceType device) {
  return {device, at::autocast::is_autocast_enabled(device),
          at::autocast::get_autocast_dtype(device)};
}

void AutocastState::set() const {
  at::autocast::set_autocast_enabled(device, enabled);
  at::autocast::set_autocast_dtype(device, dtype);
}

namespace {

thread_local const AutocastState* formulas = nullptr;

// While a node's gradients are computed: the thread's autocast is that of the forward, and the one
// that was on before is that of the formulas of the gradients.
class ForwardsAutocast {
 public:
  explicit ForwardsAutocast(const AutocastState& forward)
      : before_(AutocastState::of_thread(forward.device)), outer_(formulas) {
    forward.set();
    formulas = &before_;
    if (before_.enabled) {
      by_function_.emplace();
    }
  }
  ~ForwardsAutocast() {
    formulas = outer_;
    before_.set();
  }
  ForwardsAutocast(const ForwardsAutocast&) = delete;
  ForwardsAutocast& operator=(const ForwardsAutocast&) = delete;

 private:
  const AutocastState before_;
  const AutocastState* const outer_;
  // Kernels are made for formulas without autocast, as where a program leaves its block before it
  // calls backward.
  std::optional<InsideGuard> by_function_;
};

}  // namespace

std::optional<AutocastState> autocast_of_formulas() {
  return formulas == nullptr ? std::nullopt : std::optional<AutocastState>(*formulas);
}

// What a call leaves in autograd's graph.
class FunctionNode final : public torch::autograd::Node {
 public:
  FunctionNode(FunctionAutograd& owner, std::uint64_t hash, std::span<const c10::IValue> arguments)
      : owner_(owner),
        hash_(hash),
        autocast_(AutocastState::of_thread(owner.backward().device_type())) {
    arguments_.reserve(arguments.size());
    for (const c10::IValue& argument : arguments) {
      if (argument.isTensor()) {
        saved_.emplace_back(argument.toTensor(), /*is_output=*/false);
        add_next_edge(argument.toTensor().defined()
                          ? torch::autograd::impl::gradient_edge(argument.toTensor())
                          : torch::autograd::Edge());
        arguments_.emplace_back(at::Tensor());
      } else {
        arguments_.push_back(argument);
      }
    }
  }

  variable_list apply(variable_list&& gradients) override {
    const Lock lock(saved_mutex_);
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    torch::jit::Stack stack;
    c10::List<bool> needs;
    for (std::size_t i = 0; i < saved_.size(); ++i) {
      needs.push_back(task_should_compute_output(i));
    }
    variable_list results(saved_.size());
    if (std::ranges::none_of(needs, [](bool needed) { return needed; })) {
      return results;
    }
    stack.reserve(arguments_.size() + 2);
    stack.emplace_back(complete(std::move(gradients)));
    stack.emplace_back(needs);
    std::size_t tensor = 0;
    for (const c10::IValue& argument : arguments_) {
      stack.push_back(argument.isTensor() ? c10::IValue(saved_[tensor++].unpack()) : argument);
    }
    const ForwardsAutocast autocast(autocast_);
    look_who_answers(stack);
    owner_.backward().op().callBoxed(&stack);
    const c10::List<at::Tensor> computed = std::move(stack.back()).toTensorList();
    std::size_t next = 0;
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (needs.get(i) && next < computed.size()) {
        results[i] = computed.get(next++);
      }
    }
    return results;
  }

  void release_variables() override {
    const Lock lock(saved_mutex_);
    released_ = true;
    for (torch::autograd::SavedVariable& variable : saved_) {
      variable.reset_data();
    }
  }

  std::string name() const override { return owner_.backward().name(); }

 private:
  // One gradient for each output that has one, zeros where autograd has none.
  c10::List<at::Tensor> complete(variable_list gradients) {
    c10::List<at::Tensor> all;
    all.reserve(gradients.size());
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      all.push_back(gradients[i].defined() ? std::move(gradients[i])
                                           : input_metadata(i).zeros_like());
    }
    return all;
  }

  void look_who_answers(const torch::jit::Stack& stack) {
    static std::atomic<std::uint64_t> calls{0};
    if (hash_ == 0 || calls.fetch_add(1, std::memory_order_relaxed) % kLookEvery != 0) {
      return;
    }
    OperatorHook& hook = owner_.backward();
    CallView view;
    if (hook.active() && hook.read_call(stack, view) == AsideReason::kNone) {
      const std::span<const Word> words = view.key.words();
      if (hook.table().find(words, hash_words(words)).state == EntryState::kNative) {
        owner_.note_native_backward(hash_);
      }
    }
  }

  FunctionAutograd& owner_;
  const std::uint64_t hash_;
  const AutocastState autocast_;
  std::vector<c10::IValue> arguments_;  // tensors are placeholders for saved_
  Mutex saved_mutex_;
  std::vector<torch::autograd::SavedVariable> saved_ EAGERCACHE_GUARDED_BY(saved_mutex_);
  bool released_ EAGERCACHE_GUARDED_BY(saved_mutex_) = false;
};

FunctionAutograd::FunctionAutograd(OperatorHook& hook, c10::DispatchKey key, OperatorHook* backward)
    : hook_(hook),
      backward_(backward),
      op_(hook.op()),
      num_arguments_(hook.plan().readers.size()),
      only_tensors_(has_only_tensors(hook.op().schema())),
      function_(compat::lookup_kernel(hook.op(), key)) {}

std::span<const c10::IValue> FunctionAutograd::arguments(
    const torch::jit::Stack& stack) const noexcept {
  return {stack.data() + (stack.size() - num_arguments_), num_arguments_};
}

void FunctionAutograd::call(c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const std::span<const c10::IValue> own = arguments(*stack);
  // A compiler's graph runs without autocast, so that it gets what the function does under it.
  if (at::autocast::is_autocast_enabled(hook_.device_type()) && any_tensor(own, is_traced))
      [[unlikely]] {
    function_.callBoxed(op_, keys, stack);
    return;
  }
  const bool records = c10::GradMode::is_enabled() && any_tensor(own, needs_gradient);
  if (!records && !any_tensor(own, has_tangent)) [[likely]] {
    // Nothing is recorded below, so that autograd need not be switched off; a backward operator's
    // own function needs it.
    op_.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
    return;
  }
  std::uint64_t hash = 0;
  if (!records || !takes_call(own, *stack, &hash)) {
    function_.callBoxed(op_, keys, stack);
    return;
  }
  answer_with_node(keys, hash, stack);
}

bool FunctionAutograd::takes_call(std::span<const c10::IValue> arguments,
                                  const torch::jit::Stack& stack,
                                  std::uint64_t* hash) const noexcept {
  if (backward_ == nullptr || !only_tensors_ || !hook_.active() || !backward_->active() ||
      !hooks_answer.load(std::memory_order_relaxed) || InsideGuard::active() ||
      any_tensor(arguments, has_tangent) || any_tensor(arguments, is_wrapped_by_functorch)) {
    return false;
  }
  if (any_tensor(arguments, is_traced)) {
    return true;  // a compiler's graph gets both operators
  }
  CallView view;
  if (hook_.read_call(stack, view) != AsideReason::kNone) {
    return false;
  }
  *hash = hash_words(view.key.words());
  const EntryState state = hook_.table().find(view.key.words(), *hash).state;
  if (state == EntryState::kNative || (state != EntryState::kKernel && kernels_frozen.load())) {
    return false;
  }
  const std::uint64_t mark = remembered(*hash);
  return native_backwards_[*hash % kRemembered].load(std::memory_order_relaxed) != mark;
}

void FunctionAutograd::note_native_backward(std::uint64_t hash) noexcept {
  native_backwards_[hash % kRemembered].store(remembered(hash), std::memory_order_relaxed);
}

void FunctionAutograd::answer_with_node(c10::DispatchKeySet keys, std::uint64_t hash,
                                        torch::jit::Stack* stack) {
  const std::span<const c10::IValue> own = arguments(*stack);
  const std::vector<c10::IValue> given(own.begin(), own.end());
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op_.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  const std::size_t count = op_.schema().returns().size();
  const std::span<c10::IValue> returned{stack->data() + (stack->size() - count), count};
  for (const c10::IValue& result : returned) {
    const bool is_argument =
        result.isTensor() && any_tensor(given, [&result](const at::Tensor& tensor) {
          return tensor.is_same(result.toTensor());
        });
    if (is_argument) {
      // The function hands back what it was given, which no operator may: it is left to itself.
      torch::jit::drop(*stack, count);
      stack->insert(stack->end(), given.begin(), given.end());
      function_.callBoxed(op_, keys, stack);
      return;
    }
  }
  const auto node = make_node<FunctionNode>(*this, hash, given);
  for (c10::IValue& result : returned) {
    if (result.isTensor() && result.toTensor().defined() &&
        torch::autograd::isDifferentiableType(result.toTensor().scalar_type())) {
      torch::autograd::set_history(result.toTensor(), node);
    }
  }
}

}  // namespace eagercache
