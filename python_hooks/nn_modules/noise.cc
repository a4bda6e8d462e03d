#include "python_hooks/nn_modules/noise.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/core/ScalarType.h>
#include <pybind11/stl.h>

#include <array>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "dispatcher/plans/plan_fields.h"

namespace eagercache {
namespace {

namespace py = pybind11;

c10::ScalarType read_dtype(const std::string& name) {
  const auto dtype = dtype_by_name(name);
  if (!dtype || c10::isComplexType(*dtype) || c10::isQIntType(*dtype)) {
    throw std::invalid_argument("a kernel draws masks of " + name);
  }
  return *dtype;
}

ModuleNoise::Kind read_kind(std::string_view name) {
  using Kind = ModuleNoise::Kind;
  static constexpr std::array<std::pair<std::string_view, Kind>, 7> kKinds{{
      {"bernoulli", Kind::kBernoulli},
      {"dropout", Kind::kDropout},
      {"normal", Kind::kNormal},
      {"uniform", Kind::kUniform},
      {"exponential", Kind::kExponential},
      {"integers", Kind::kIntegers},
      {"permutation", Kind::kPermutation},
  }};
  for (const auto& [known, kind] : kKinds) {
    if (known == name) {
      return kind;
    }
  }
  throw std::invalid_argument("a kernel draws " + std::string(name));
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
      return like.bernoulli_(first);
    case Kind::kDropout:
      return std::get<1>(at::native_dropout(like, first, true));
    case Kind::kNormal:
      return like.normal_(first, second);
    case Kind::kUniform:
      return like.uniform_(first, second);
    case Kind::kExponential:
      return like.exponential_(first);
    case Kind::kIntegers:
      return like.random_(static_cast<std::int64_t>(first), static_cast<std::int64_t>(second));
    case Kind::kPermutation:
      return at::randperm(static_cast<std::int64_t>(first), like.options());
  }
  throw std::logic_error("a mask of no kind");
}

std::vector<at::Tensor> draw_again(const std::vector<ModuleNoise>& noise, c10::Device device,
                                   const at::Tensor& state) {
  std::vector<at::Tensor> drawn;
  DrawnMasks as_it_was({}, true, device, drawn);  // which is never used
  if (!as_it_was.drawn()) {
    throw std::runtime_error("the generator's state cannot be read");
  }
  {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
  for (const ModuleNoise& one : noise) {
    drawn.push_back(one.draw(device));
  }
  return drawn;
}

std::vector<ModuleNoise> read_noise(const py::handle& rows) {
  std::vector<ModuleNoise> noise;
  for (const py::handle& row : rows) {
    const auto fields = py::cast<py::tuple>(row);
    ModuleNoise one;
    one.kind = read_kind(py::cast<std::string>(fields[0]));
    one.first = py::cast<double>(fields[1]);
    one.second = py::cast<double>(fields[2]);
    one.dtype = read_dtype(py::cast<std::string>(fields[3]));
    one.sizes = py::cast<std::vector<std::int64_t>>(fields[4]);
    one.strides = py::cast<std::vector<std::int64_t>>(fields[5]);
    if (one.sizes.size() != one.strides.size()) {
      throw std::invalid_argument("a kernel draws a mask of no layout");
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
