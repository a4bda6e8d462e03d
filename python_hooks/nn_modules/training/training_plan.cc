#include "python_hooks/nn_modules/training/training_plan.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace eagercache {
namespace {

namespace py = pybind11;

std::vector<std::size_t> indices(const py::handle& list, std::size_t limit) {
  auto values = py::cast<std::vector<std::size_t>>(list);
  if (std::ranges::any_of(values, [limit](std::size_t value) { return value >= limit; })) {
    throw std::invalid_argument("the training plan names a tensor that is not there");
  }
  return values;
}

std::size_t index(const py::handle& value, std::size_t limit) {
  const auto number = py::cast<std::size_t>(value);
  if (number >= limit) {
    throw std::invalid_argument("the training plan names a tensor that is not there");
  }
  return number;
}

ModuleTraining::Source read_source(const std::string& name) {
  if (name == "input") {
    return ModuleTraining::Source::kInput;
  }
  if (name == "output") {
    return ModuleTraining::Source::kOutput;
  }
  if (name != "made") {
    throw std::invalid_argument("the training plan saves " + name);
  }
  return ModuleTraining::Source::kMade;
}

using Sizes = std::vector<std::int64_t>;

ModuleTraining::Saved read_saved(const ModuleTraining& plan, const py::tuple& row,
                                 std::size_t num_inputs) {
  const ModuleTraining::Source source = read_source(py::cast<std::string>(row[0]));
  const std::size_t limit = source == ModuleTraining::Source::kInput    ? num_inputs
                            : source == ModuleTraining::Source::kOutput ? plan.num_answers
                                                                        : plan.num_made;
  return {source, index(row[1], limit), py::cast<Sizes>(row[2]), py::cast<Sizes>(row[3])};
}

ModuleTraining::Rebuilt read_rebuilt(const ModuleTraining& plan, const py::tuple& row,
                                     std::size_t num_inputs) {
  std::optional<ModuleTraining::Rebuilt::Part> part;
  if (!row[3].is_none()) {
    const py::tuple whole = py::cast<py::tuple>(row[3]);
    part.emplace(py::cast<Sizes>(whole[0]), py::cast<Sizes>(whole[1]),
                 py::cast<std::int64_t>(whole[2]));
  }
  return {index(row[0], num_inputs), index(row[1], plan.saved.size()), std::move(part)};
}

// Orders the outer tangents, and numbers the node's inputs for what comes from other parts; none is
// behind itself.
void order_parts(ModuleTraining& plan) {
  std::vector<ModuleTraining::Tangent>& tangents = plan.tangents;
  std::vector<bool> is_behind(tangents.size());
  for (const ModuleTraining::Tangent& tangent : tangents) {
    for (const std::size_t inner : tangent.behind) {
      if (tangents[inner].behind.size() >= tangent.behind.size()) {
        throw std::invalid_argument("the training plan computes parts of an answer in a circle");
      }
      is_behind[inner] = true;
    }
  }
  std::size_t next = tangents.size();
  for (std::size_t i = 0; i < tangents.size(); ++i) {
    if (is_behind[i]) {
      tangents[i].counted = next++;
    }
    if (!tangents[i].behind.empty()) {
      plan.outer.push_back(i);
    }
  }
  std::ranges::stable_sort(plan.outer, {},
                           [&](std::size_t i) { return tangents[i].behind.size(); });
}

void check_sizes(const ModuleTraining& plan, std::size_t num_inputs) {
  if (plan.noise.size() > num_inputs) {
    throw std::invalid_argument("the training plan draws more masks than its forward takes");
  }
  if (!std::ranges::is_sorted(plan.without)) {
    throw std::invalid_argument("the training plan does not order its arguments");
  }
  const auto num_read = static_cast<std::size_t>(
      std::ranges::count(plan.tangents, false, &ModuleTraining::Tangent::in_object));
  if (plan.backward->num_inputs() != plan.saved.size() + num_read ||
      plan.backward->num_outputs() != plan.gradients.size() || num_read == 0) {
    throw std::invalid_argument("the training plan does not fit its backward");
  }
}

// Calls `take` with each list of sizes or strides that changes with a call's sizes, in order.
template <typename Plan, typename Take>
void each_open(Plan& plan, const Take& take) {
  for (auto& saved : plan.saved) {
    take(saved.sizes);
    take(saved.strides);
  }
  for (auto& tangent : plan.tangents) {
    if (!tangent.in_object) {
      take(tangent.sizes);
      take(tangent.strides);
    }
  }
  for (const std::size_t gradient : plan.open) {
    take(plan.gradients[gradient].strides);
  }
  for (auto& one : plan.noise) {
    take(one.sizes);
    take(one.strides);
  }
}

}  // namespace

std::size_t count_sizes(const ModuleTraining& plan) {
  std::size_t count = 0;
  each_open(plan, [&count](const Sizes& sizes) { count += sizes.size(); });
  return count;
}

std::shared_ptr<const ModuleTraining> with_sizes(const ModuleTraining& plan,
                                                 std::span<const std::int64_t> numbers) {
  auto own = std::make_shared<ModuleTraining>(plan);
  std::size_t next = 0;
  each_open(*own, [&](Sizes& sizes) {
    for (std::int64_t& size : sizes) {
      size = numbers[next++];
    }
  });
  return own;
}

std::unique_ptr<const ModuleTraining> read_training_plan(const py::dict& plan,
                                                         std::size_t num_inputs,
                                                         std::size_t num_outputs,
                                                         ModelContainer* backward) {
  auto read = std::make_unique<ModuleTraining>();
  read->backward = backward;
  read->identity = py::cast<std::string>(plan["identity"]);
  read->keeps_output = py::cast<std::vector<bool>>(plan["keeps_output"]);
  read->num_answers = read->keeps_output.size();
  for (const py::handle& row : plan["buffers"]) {
    const py::tuple fields = py::cast<py::tuple>(row);
    read->buffers.push_back({index(fields[0], num_inputs), py::cast<std::uint32_t>(fields[1]),
                             py::cast<bool>(fields[2])});
  }
  for (const py::handle& row : plan["views"]) {
    const py::tuple fields = py::cast<py::tuple>(row);
    read->views.push_back({index(fields[0], read->num_answers), index(fields[1], read->num_answers),
                           py::cast<std::int64_t>(fields[2])});
  }
  const std::size_t before_made = read->num_answers + read->buffers.size();
  if (num_outputs < before_made) {
    throw std::invalid_argument("the training plan does not fit its forward");
  }
  read->num_made = num_outputs - before_made;
  for (const py::handle& row : plan["saved"]) {
    read->saved.push_back(read_saved(*read, py::cast<py::tuple>(row), num_inputs));
  }
  const auto tangents = py::cast<py::sequence>(plan["tangents"]);
  for (const py::handle& row : tangents) {
    const py::tuple fields = py::cast<py::tuple>(row);
    read->tangents.push_back({index(fields[0], read->num_answers), py::cast<Sizes>(fields[1]),
                              py::cast<Sizes>(fields[2]), py::cast<bool>(fields[3]),
                              indices(fields[4], tangents.size()), std::nullopt});
  }
  order_parts(*read);
  for (const py::handle& row : plan["gradients"]) {
    const py::tuple fields = py::cast<py::tuple>(row);
    read->gradients.push_back({index(fields[0], num_inputs),
                               indices(fields[1], read->tangents.size()),
                               py::cast<Sizes>(fields[2])});
  }
  for (const py::handle& row : plan["rebuilt"]) {
    const py::tuple fields = py::cast<py::tuple>(row);
    read->rebuilt.push_back(read_rebuilt(*read, fields, num_inputs));
    read->without.push_back(py::cast<std::size_t>(fields[2]));
  }
  if (plan.contains("open")) {
    read->open = indices(plan["open"], read->gradients.size());
  }
  read->noise = read_noise(plan["noise"]);
  read->draws = py::cast<bool>(plan["draws"]);
  read->redraws = plan.contains("redraws");
  check_sizes(*read, num_inputs);
  return read;
}

}  // namespace eagercache
