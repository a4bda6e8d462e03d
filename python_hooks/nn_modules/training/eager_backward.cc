#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "python_hooks/nn_modules/training/training_node.h"

namespace eagercache {
namespace {

namespace py = pybind11;

using torch::autograd::variable_list;

py::object& eager_gradients() {
  static auto* const handler = new py::object();
  return *handler;
}

}  // namespace

variable_list ModuleNode::gradients_behind(std::size_t tangent, const at::Tensor& gradient) {
  variable_list gradients(plan().tangents.size());
  gradients[tangent] = gradient;
  return answer_by_eager(gradients, std::vector<bool>(plan().gradients.size()),
                         plan().tangents[tangent].behind, {});
}

variable_list ModuleNode::answer_by_eager(const variable_list& gradients,
                                          const std::vector<bool>& wanted,
                                          const std::vector<std::size_t>& parts,
                                          const std::vector<std::size_t>& whole) {
  const py::gil_scoped_acquire gil;
  try {
    std::vector<at::Tensor> own;
    std::vector<at::Tensor> held;
    py::list rebuilt;
    {
      // The lock is never waited for with the GIL.
      const py::gil_scoped_release no_gil;
      own = whole_inputs(held);
    }
    TORCH_CHECK(call_ != nullptr && !own.empty(), torch::autograd::ERR_BACKWARD_TWICE);
    const auto call = py::reinterpret_borrow<py::tuple>(call_);
    check_versions(own);
    for (const ModuleTraining::Rebuilt& one : plan().rebuilt) {
      rebuilt.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(own[one.input])));
    }
    py::list masks;
    // Those that are drawn once more the forward draws itself, and what it computes again, too.
    const std::size_t kept = num_kept(plan(), own.size());
    for (std::size_t i = own.size() - plan().noise.size(); i < kept; ++i) {
      masks.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(own[i])));
    }
    py::list inputs;
    for (const ModuleTraining::Gradient& gradient : plan().gradients) {
      inputs.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(own[gradient.input])));
    }
    const py::list held_then = inputs_then(own);
    py::list given;
    for (const at::Tensor& gradient : gradients) {
      given.append(gradient.defined()
                       ? py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient))
                       : py::object(py::none()));
    }
    py::list before;
    for (const ModuleTraining::Buffer& buffer : plan().buffers) {
      if (buffer.is_read) {
        before.append(py::make_tuple(
            py::reinterpret_steal<py::object>(THPVariable_Wrap(own[buffer.input])),
            py::reinterpret_steal<py::object>(THPVariable_Wrap(held[before.size()]))));
      }
    }
    py::dict autocast;
    for (const auto& [device, dtype] : autocast_) {
      autocast[py::str(device)] = py::cast(dtype);
    }
    const py::object drawn_from =
        drawn_from_.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(drawn_from_))
                              : py::object(py::none());
    const py::object answer = eager_gradients()(
        call[0], call[1], call[2], rebuilt, masks, drawn_from, before, plan().identity, autocast,
        inputs, wanted, given, parts, whole, held_then, call[3]);
    variable_list results;
    for (const py::handle& gradient : answer) {
      results.push_back(gradient.is_none() ? at::Tensor() : THPVariable_Unpack(gradient.ptr()));
    }
    return results;
  } catch (py::error_already_set& error) {
    // As autograd's own Python functions raise, from whatever thread.
    error.restore();
    python_error persistent;
    persistent.persist();
    throw persistent;
  }
}

py::list ModuleNode::inputs_then(const std::vector<at::Tensor>& inputs) const {
  py::list rows;
  for (std::size_t i = 0; i < kernel_.inputs.size(); ++i) {
    const ModuleKernel::Input& input = kernel_.inputs[i];
    rows.append(py::make_tuple(input.from_module ? static_cast<std::int64_t>(input.index) : -1,
                               py::reinterpret_steal<py::object>(THPVariable_Wrap(inputs[i])),
                               static_cast<bool>(needed_[i])));
  }
  return rows;
}

std::vector<at::Tensor> ModuleNode::whole_inputs(std::vector<at::Tensor>& before) {
  const Lock lock(saved_mutex_);
  before = before_;
  std::vector<at::Tensor> inputs = inputs_;
  for (std::size_t i = 0; i < shells_.size(); ++i) {
    const ModuleTraining::Rebuilt& one = plan().rebuilt[i];
    inputs[one.input] = shells_[i].rebuild(saved_[one.saved].unpack(), one.part);
  }
  return inputs;
}

void ModuleNode::check_versions(const std::vector<at::Tensor>& inputs) const {
  const std::size_t kept = num_kept(plan(), inputs.size());
  for (std::size_t i = 0; i < kept; ++i) {
    const bool is_written = std::ranges::any_of(
        plan().buffers, [i](const ModuleTraining::Buffer& buffer) { return buffer.input == i; });
    const bool is_rebuilt = std::ranges::any_of(
        plan().rebuilt, [i](const ModuleTraining::Rebuilt& one) { return one.input == i; });
    TORCH_CHECK(is_written || is_rebuilt || inputs[i]._version() == versions_[i],
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: an input or a parameter of a module, whose forward is run "
                "again for this gradient");
  }
}

void set_eager_gradients(const py::object& handler) { eager_gradients() = handler; }

}  // namespace eagercache
