#include "python_hooks/nn_modules/training/part_node.h"

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "dispatcher/autograd/autograd_node.h"

namespace eagercache {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

// By a hook, by `retain_grad`, or by `autograd.grad` in the pass that runs.
bool is_node_watched(Node& node) {
  if (!node.pre_hooks().empty() || !node.tensor_pre_hooks().empty() ||
      !node.retains_grad_hooks().empty()) {
    return true;
  }
  const auto* const asked = torch::autograd::get_current_graph_task_exec_info();
  if (asked == nullptr) {
    return false;
  }
  const auto found = asked->find(&node);
  return found != asked->end() && found->second.captures_ != nullptr;
}

}  // namespace

void ModuleNode::add_part(const Edge& part) { parts_.push_back(weak_node(part.function)); }

bool ModuleNode::is_watched() {
  return is_node_watched(*this) || std::ranges::any_of(parts_, [](const WeakNode& part) {
           const auto node = part.lock();
           return node && is_node_watched(*node);
         });
}

PartNode::PartNode(const Edge& call, const ModuleTraining& plan, std::size_t tangent,
                   const std::vector<Edge>& places)
    : tangent_(tangent) {
  add_next_edge({call.function, static_cast<std::uint32_t>(tangent)});
  for (const std::size_t inner : plan.tangents[tangent].behind) {
    add_next_edge(places[inner]);
    add_next_edge({call.function, static_cast<std::uint32_t>(*plan.tangents[inner].counted)});
  }
}

variable_list PartNode::apply(variable_list&& gradients) {
  variable_list given(num_outputs());
  auto& call = static_cast<ModuleNode&>(*next_edge(0).function);
  if (gradients[0].defined() && call.is_watched()) [[unlikely]] {
    const variable_list behind = call.gradients_behind(tangent_, gradients[0]);
    for (std::size_t i = 0; i < behind.size(); ++i) {
      given[1 + 2 * i] = behind[i];
      given[2 + 2 * i] = behind[i];
    }
  }
  given[0] = std::move(gradients[0]);
  return given;
}

void set_histories(const Edge& call, const ModuleTraining& plan, const variable_list& answers) {
  for (const ModuleTraining::Tangent& tangent : plan.tangents) {
    if (tangent.behind.empty()) [[likely]] {
      torch::autograd::set_history(answers[tangent.output], call.function);
    } else {
      call.function->add_input_metadata(answers[tangent.output]);
    }
  }
  if (plan.outer.empty()) [[likely]] {
    return;
  }
  std::vector<Edge> places;
  for (const ModuleTraining::Tangent& tangent : plan.tangents) {
    places.emplace_back(call.function, static_cast<std::uint32_t>(places.size()));
    if (tangent.counted) {
      call.function->add_input_metadata(answers[tangent.output]);
    }
  }
  for (const std::size_t i : plan.outer) {
    const ModuleTraining::Tangent& tangent = plan.tangents[i];
    const auto part = make_node<PartNode>(call, plan, i, places);
    torch::autograd::set_history(answers[tangent.output], part);
    places[i] = Edge(part, 0);
    if (tangent.counted) {
      static_cast<ModuleNode&>(*call.function).add_part(places[i]);
    }
  }
}

}  // namespace eagercache
