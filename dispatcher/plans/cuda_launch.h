#pragma once

// Plain data, made from a manifest's text when its kernel is loaded, and owned by the kernel.

#include <array>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace eagercache {

// One launch of a CUDA kernel. Pointers are numbered: the call's tensors in argument order, the
// outputs, the scratch buffers. A plan with open sizes has numbers besides, computed for each call.
struct CudaLaunch {
  struct Argument {
    enum class Kind : std::uint8_t {
      kPointer,  // `index` numbers it; `value` is an offset in bytes
      kInput,    // the number in the 0-dim CPU tensor that is input `index`, as `type`
      kValue,    // `value` holds the bits of a `type`
      kNull,     // a null pointer
      kNumber,   // the plan's number `index`, as an integer `type`
      kPart,     // as kPointer; `value` says which of the plan's numbers is the offset in bytes
      kScalar,   // the call's number `index` of those that the plan takes, as a floating `type`
      kInverse,  // 1 by it, computed as that type
    };
    enum class Type : std::uint8_t { kInt32, kInt64, kFloat32, kFloat64 };
    Kind kind = Kind::kNull;
    Type type = Type::kInt64;
    std::uint16_t index = 0;
    std::uint64_t value = 0;
  };

  // An optimizer's step over a model is a call on lists of hundreds of tensors.
  static constexpr std::size_t kMaxLaunches = 1024;
  static constexpr std::size_t kMaxObjects = 1024;
  static constexpr std::size_t kMaxArguments = 512;  // 4 KB, which every architecture takes

  std::size_t object = 0;  // index of the cubin among the entry's objects
  std::string function;
  std::array<std::uint32_t, 3> grid{};  // blocks; with open sizes which of the plan's numbers
  std::uint32_t threads = 0;            // of a block
  std::uint32_t shared = 0;             // bytes of dynamic shared memory
  std::vector<Argument> arguments;
};

// How many there are of what a launch may name.
struct CudaLaunchLimits {
  std::size_t inputs = 0;
  std::size_t pointers = 0;
  std::size_t numbers = 0;  // 0 for a plan of fixed sizes
  std::size_t scalars = 0;  // numbers of the call that the plan takes
};

// Whether every architecture takes a grid of so many blocks (CUDA C++ Programming Guide, "Technical
// Specifications per Compute Capability").
bool is_grid(const std::array<std::uint64_t, 3>& blocks) noexcept;

// The launches of a plan, at least one: {"arguments": [...], "function": ..., "grid": [x, y, z],
// "object": ..., "shared": ..., "threads": ...}. An argument is ["pointer", number, offset],
// ["input", number, type], ["value", type, integer] with the bits of its type as a signed number,
// ["null"], with open sizes ["number", index, type] and ["part", number, index], and in a plan that
// takes numbers of the call ["scalar", index, type] and ["inverse", index, type].
std::optional<std::vector<CudaLaunch>> read_cuda_launches(const nlohmann::json& value,
                                                          const CudaLaunchLimits& limits);

// How many cubins the launches name.
std::size_t count_objects(const std::vector<CudaLaunch>& launches) noexcept;

}  // namespace eagercache
