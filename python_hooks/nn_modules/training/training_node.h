#pragma once

// The node of autograd that stands for one call of a module, and what a call and its backward have
// in common. A node owns what it saved until it is released. A backward pass runs on whatever
// thread autograd has.

#include <pybind11/pybind11.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dispatcher/autograd/autograd_node.h"
#include "dispatcher/base/locks.h"
#include "dispatcher/hook/inside_guard.h"
#include "dispatcher/kernels/loaded_kernel.h"
#include "python_hooks/nn_modules/record.h"
#include "python_hooks/nn_modules/training/training_plan.h"

namespace eagercache {

// The state of autocast in which a forward ran.
using Autocast = std::vector<std::pair<std::string, c10::ScalarType>>;

Autocast read_autocast();

// What holds around everything that is ours within a call.
struct BelowAutograd {
  const InsideGuard inside;
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// Runs a container below autograd and autocast. The inputs are the container's, which lets each go
// after its last use.
LoadedKernel::Outcome run_training_container(ModelContainer& model,
                                             torch::autograd::variable_list inputs,
                                             torch::autograd::variable_list& outputs,
                                             c10::Device device);

// Whether nothing else has the tensor's memory.
bool is_alone(const at::Tensor& tensor);

// A copy with these sizes and strides.
at::Tensor in_layout(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes,
                     const std::vector<std::int64_t>& strides);

// How many of a forward's `num_inputs` inputs may be kept: those behind them are masks that the
// backward draws once more.
std::size_t num_kept(const ModuleTraining& plan, std::size_t num_inputs);

// What is left of an argument that a call does not keep.
struct ArgumentShell {
  explicit ArgumentShell(const at::Tensor& argument);

  // A tensor with the values of `saved` in the argument's place of the graph; zeros where nothing
  // is read.
  at::Tensor rebuild(const at::Tensor& saved,
                     const std::optional<ModuleTraining::Rebuilt::Part>& part) const;

  at::ScalarType dtype;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  bool is_leaf;
  torch::autograd::Edge edge;  // not valid: it needs no gradient
};

// What a program gets of one call: a node that keeps what the backward reads.
class ModuleNode final : public torch::autograd::Node {
 public:
  // `plan`: the kernel's, for the call's sizes. `drawn_from`: the generator's state before the
  // kernel, where that draws. `before`: what those of the plan's buffers held that are read.
  ModuleNode(const ModuleKernel& kernel, std::shared_ptr<const ModuleTraining> plan,
             std::vector<at::Tensor> inputs, pybind11::tuple call, Autocast autocast,
             at::Tensor drawn_from, torch::autograd::variable_list before);
  ~ModuleNode() override { drop_call(); }
  ModuleNode(const ModuleNode&) = delete;
  ModuleNode& operator=(const ModuleNode&) = delete;

  // Keeps one tensor for the backward; `tensor` shares its version with what the program may write.
  void save(const at::Tensor& tensor);

  // Takes a gradient of each of the plan's tangents, then what they have of other parts
  // (`Tangent::counted`).
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  void release_variables() override;
  std::string name() const override { return "EagercacheModuleBackward"; }

  // The gradients that one of a part of the answer, `tangent`, gives to the parts behind it, in
  // their order: of each by the ways that lead through no other of them. By the forward, run again.
  torch::autograd::variable_list gradients_behind(std::size_t tangent, const at::Tensor& gradient);
  // Remembers the node of a part that is behind another.
  void add_part(const torch::autograd::Edge& part);
  // Whether the gradient of a part that is behind another may be looked at, or changed.
  bool is_watched();

 private:
  using variable_list = torch::autograd::variable_list;

  const ModuleTraining& plan() const noexcept { return *plan_; }
  // Never with the lock, which is not waited for with the GIL either.
  void drop_call();
  // Leaves the gradients of the tangents. What came to one from other parts alone, and is as it was
  // given, is in theirs, too, and goes. Where there is more, or it was changed, the result is of
  // which tangents the gradient is all that there is, by whatever way.
  std::vector<std::size_t> take_counted(variable_list& gradients) const;
  bool reads_all(const variable_list& gradients) const;
  // Whether the kernel gave the gradients. Throws what autograd throws where a tensor that is read
  // has been written since, or was given up.
  bool answer(const variable_list& gradients, const std::vector<bool>& wanted,
              variable_list& results);
  // What the backward reads; false where it was given up. Where the graph is not kept nothing else
  // holds it afterwards, so that its memory is free as soon as it was read.
  bool unpack_saved(variable_list& inputs);
  // The gradient of an output in the layout that the backward reads; zeros where there is none.
  at::Tensor tangent(const at::Tensor& gradient, std::size_t index) const;
  // Autograd gives no gradient to what no defined one reaches.
  bool is_reached(std::size_t index, const variable_list& gradients) const;
  // By the module's own forward, run again, and autograd: the gradients of the inputs, or of the
  // tangents `parts`. Nothing is added to those of the tangents `whole`.
  variable_list answer_by_eager(const variable_list& gradients, const std::vector<bool>& wanted,
                                const std::vector<std::size_t>& parts,
                                const std::vector<std::size_t>& whole);
  // The inputs, those that are not kept made anew; none where they were given up. `before` gets
  // what the buffers held that are read.
  std::vector<at::Tensor> whole_inputs(std::vector<at::Tensor>& before);
  // Of each of the kernel's inputs which slot of the module it was in, or -1, and whether it needed
  // gradients. With the GIL.
  pybind11::list inputs_then(const std::vector<at::Tensor>& inputs) const;
  void check_versions(const std::vector<at::Tensor>& inputs) const;

  using WeakNode = decltype(weak_node(std::declval<torch::autograd::Edge>().function));

  const ModuleKernel& kernel_;
  const std::shared_ptr<const ModuleTraining> plan_;
  std::vector<WeakNode> parts_;  // of parts that are behind others; never changes after the call
  const Autocast autocast_;
  const at::Tensor drawn_from_;
  std::vector<std::int64_t> versions_;  // of inputs_
  std::vector<bool> needed_;            // which of inputs_ needed gradients at the call
  Mutex saved_mutex_;
  std::vector<torch::autograd::SavedVariable> saved_ EAGERCACHE_GUARDED_BY(saved_mutex_);
  std::vector<at::Tensor> inputs_ EAGERCACHE_GUARDED_BY(saved_mutex_);
  // What the plan's buffers held that are read.
  std::vector<at::Tensor> before_ EAGERCACHE_GUARDED_BY(saved_mutex_);
  std::vector<ArgumentShell> shells_ EAGERCACHE_GUARDED_BY(saved_mutex_);  // of plan().rebuilt
  bool released_ EAGERCACHE_GUARDED_BY(saved_mutex_) = false;
  bool gave_up_saved_ EAGERCACHE_GUARDED_BY(saved_mutex_) = false;  // to a kernel
  PyObject* call_;                                                  // owned; guarded by the GIL
};

// `handler(module, args, kwargs, rebuilt, masks, drawn_from, before, identity, autocast, inputs,
// wanted, gradients, parts, whole, then, values_changes)`
// gives the wanted inputs' gradients, or None, by the module's own forward and autograd: where the
// gradient of a gradient is asked for, and where the kernel cannot answer. `rebuilt` stand where
// args and kwargs have `...`, in order; `masks` are what the call drew, `drawn_from` is the state
// of the generator that its kernel drew from, or None, and `before` has each buffer that the
// forward reads and writes, with what it held. Where there are `parts`, positions among
// `gradients`, it gives the gradients of these instead, as `gradients_behind` says. To those of
// `gradients` at the positions `whole` nothing is added that comes from others. `then` has each
// tensor that the kernel read, with its slot in the module (-1: an argument) and whether it needed
// gradients at the call, `values_changes` is the record's of then. It may raise. Kept for ever.
void set_eager_gradients(const pybind11::object& handler);

}  // namespace eagercache
