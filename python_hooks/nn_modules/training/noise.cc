#include "python_hooks/nn_modules/training/noise.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/core/ScalarType.h>
#include <pybind11/stl.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "dispatcher/plans/plan_fields.h"

namespace eagercache {
namespace {

namespace py = pybind11;

c10::ScalarType read_dtype(const std::string& name) {
  const auto dtype = dtype_by_name(name);
  if (!dtype || (*dtype != c10::ScalarType::Bool && !c10::isFloatingType(*dtype))) {
    throw std::invalid_argument("the training plan draws masks of " + name);
  }
  return *dtype;
}

ModuleNoise::Kind read_kind(const std::string& name) {
  if (name == "bernoulli") {
    return ModuleNoise::Kind::kBernoulli;
  }
  if (name == "dropout") {
    return ModuleNoise::Kind::kDropout;
  }
  if (name == "normal") {
    return ModuleNoise::Kind::kNormal;
  }
  if (name != "uniform") {
    throw std::invalid_argument("the training plan draws " + name);
  }
  return ModuleNoise::Kind::kUniform;
}

// A state that cannot be read is left to itself.
at::Tensor state_of(at::Generator& generator) {
  try {
    const std::lock_guard lock(generator.mutex());
    return generator.get_state();
  } catch (...) {
    return {};
  }
}

}  // namespace

at::Tensor ModuleNoise::draw(c10::Device device) const {
  const at::Tensor like =
      at::empty_strided(sizes, strides, at::TensorOptions().dtype(dtype).device(device));
  switch (kind) {
    case Kind::kBernoulli:
      return like.bernoulli_(probability);
    case Kind::kDropout:
      return std::get<1>(at::native_dropout(like, probability, true));
    case Kind::kNormal:
      return like.normal_();
    case Kind::kUniform:
      return like.uniform_();
  }
  throw std::logic_error("a mask of no kind");
}

std::vector<ModuleNoise> read_noise(const py::handle& rows) {
  std::vector<ModuleNoise> noise;
  for (const py::handle& row : rows) {
    const auto fields = py::cast<py::tuple>(row);
    const auto kind = py::cast<std::string>(fields[0]);
    ModuleNoise one;
    one.kind = read_kind(kind);
    one.probability = py::cast<double>(fields[1]);
    one.dtype = read_dtype(py::cast<std::string>(fields[2]));
    one.sizes = py::cast<std::vector<std::int64_t>>(fields[3]);
    one.strides = py::cast<std::vector<std::int64_t>>(fields[4]);
    if (one.sizes.size() != one.strides.size()) {
      throw std::invalid_argument("the training plan draws a mask of no layout");
    }
    noise.push_back(std::move(one));
  }
  return noise;
}

DrawnMasks::DrawnMasks(const std::vector<ModuleNoise>& noise, bool draws, c10::Device device,
                       std::vector<at::Tensor>& inputs) noexcept {
  try {
    if (draws || !noise.empty()) [[unlikely]] {
      generator_ = at::globalContext().defaultGenerator(device);
      before_ = state_of(generator_);
    }
    if (draws && !before_.defined()) {
      return;  // a gradient of a gradient would draw other numbers
    }
    for (const ModuleNoise& one : noise) {
      inputs.push_back(one.draw(device));
    }
    drawn_ = true;
  } catch (...) {  // native's own call says what is wrong
  }
}

DrawnMasks::~DrawnMasks() {
  if (before_.defined()) {
    try {
      const std::lock_guard lock(generator_.mutex());
      generator_.set_state(before_);
    } catch (...) {  // nothing was broken: other numbers are drawn than without a kernel
    }
  }
}

}  // namespace eagercache
