#pragma once

// Random masks and numbers that a call of a kernel draws before it. The kernel owns the
// descriptions; a call owns its masks and puts the generator back unless it was answered.

#include <pybind11/pybind11.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace eagercache {

// A random mask, or other numbers, that a call draws as its module's own forward would have
// (dropout_masks.py): with native's operator and from the program's generator. Never changes.
struct ModuleNoise {
  // With `first` and `second`: of a one; of an element that is dropped; mean and standard
  // deviation; the bounds of [first, second), of integers, too; rate; how many are permuted.
  enum class Kind : std::uint8_t {
    kBernoulli,
    kDropout,
    kNormal,
    kUniform,
    kExponential,
    kIntegers,
    kPermutation
  };
  Kind kind = Kind::kBernoulli;
  double first = 0;
  double second = 0;
  c10::ScalarType dtype = c10::ScalarType::Bool;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;

  // Below autograd. Throws what native throws.
  at::Tensor draw(c10::Device device) const;
};

// What was drawn on the device where the program's generator was in `state`, once more. Leaves it
// where it is. Below autograd. Throws what native throws.
std::vector<at::Tensor> draw_again(const std::vector<ModuleNoise>& noise, c10::Device device,
                                   const at::Tensor& state);

// Reads the rows that Noise.row writes. Throws std::invalid_argument for others.
std::vector<ModuleNoise> read_noise(const pybind11::handle& rows);

// The masks of one call, and what its kernel `draws` itself. Puts the program's generator back to
// where it was unless they are used.
class DrawnMasks {
 public:
  // Draws the masks and puts them behind `inputs`. Below autograd.
  DrawnMasks(const std::vector<ModuleNoise>& noise, bool draws, c10::Device device,
             std::vector<at::Tensor>& inputs) noexcept;
  ~DrawnMasks();
  DrawnMasks(const DrawnMasks&) = delete;
  DrawnMasks& operator=(const DrawnMasks&) = delete;

  // Whether all are there: no memory was wanting.
  bool drawn() const noexcept { return drawn_; }
  // The call is answered. Gives the state that the generator was in; undefined where nothing drew.
  at::Tensor use() noexcept { return std::exchange(before_, at::Tensor()); }

 private:
  bool drawn_ = false;
  at::Generator generator_;
  at::Tensor before_;  // the generator's state; undefined: it stays as it is
};

}  // namespace eagercache
