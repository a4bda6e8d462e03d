#pragma once

// Gives each part of an answer its place in autograd's graph: one that is computed from another
// part leads to it, as in the graph of the module's own forward.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <vector>

#include "python_hooks/nn_modules/training/training_node.h"

namespace eagercache {

// The node of a part that others are behind. It passes its gradient on to the call's node, whose
// kernel goes all ways from there. Only where a part behind it is watched it gives that its own
// gradient, too, and tells the call's node of that.
class PartNode final : public torch::autograd::Node {
 public:
  // `tangent`: of the part. `places`: of each of the plan's tangents, where its gradient goes.
  PartNode(const torch::autograd::Edge& call, const ModuleTraining& plan, std::size_t tangent,
           const std::vector<torch::autograd::Edge>& places);

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "EagercacheModulePartBackward"; }

 private:
  std::size_t tangent_;
};

// Puts `answers`, of which the plan's tangents are, behind `call`, the edge to their ModuleNode.
void set_histories(const torch::autograd::Edge& call, const ModuleTraining& plan,
                   const torch::autograd::variable_list& answers);

}  // namespace eagercache
