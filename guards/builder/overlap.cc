#include "guards/builder/overlap.h"

#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

namespace eagercache {
namespace {

// The addresses that one tensor covers, from its first byte to behind its last one.
struct Memory {
  std::uintptr_t begin;
  std::uintptr_t end;
  bool written;
};

constexpr std::size_t kInlineTensors = 64;
constexpr std::size_t kFewTensors = 6;  // comparing all pairs of them is less than sorting
constexpr std::size_t kMaxDimensions = 16;

Memory memory_of(const c10::TensorImpl& impl, bool written) noexcept {
  std::int64_t last = 0;  // an element's offset; the key's limits keep it in range
  const c10::IntArrayRef sizes = impl.sizes();
  const c10::IntArrayRef strides = impl.strides();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    last += (sizes[i] - 1) * strides[i];
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(impl.data());
  const std::uintptr_t bytes = (static_cast<std::uintptr_t>(last) + 1) * impl.itemsize();
  return {begin, begin + bytes, written};
}

// Whether two indices may address one element: each dimension, taken from the smallest stride up,
// must step over all that the ones before it reach.
bool overlaps_itself(const c10::TensorImpl& impl) noexcept {
  if (impl.is_non_overlapping_and_dense()) [[likely]] {
    return false;
  }
  const c10::IntArrayRef sizes = impl.sizes();
  const c10::IntArrayRef strides = impl.strides();
  if (sizes.size() > kMaxDimensions) {
    return true;
  }
  std::array<std::size_t, kMaxDimensions> order;
  std::size_t count = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1) {
      order[count++] = i;
    }
  }
  std::sort(order.begin(), order.begin() + count,
            [&](std::size_t a, std::size_t b) { return strides[a] < strides[b]; });
  std::int64_t reach = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (strides[order[i]] <= reach) {
      return true;
    }
    reach += (sizes[order[i]] - 1) * strides[order[i]];
  }
  return false;
}

bool few_meet(std::span<const Memory> memories) noexcept {
  for (std::size_t i = 1; i < memories.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const Memory& a = memories[i];
      const Memory& b = memories[j];
      if ((a.written || b.written) && a.begin < b.end && b.begin < a.end) {
        return true;
      }
    }
  }
  return false;
}

bool any_meet(std::span<Memory> memories) noexcept {
  if (memories.size() <= kFewTensors) {
    return few_meet(memories);
  }
  std::sort(memories.begin(), memories.end(),
            [](const Memory& a, const Memory& b) { return a.begin < b.begin; });
  std::uintptr_t end = 0;          // of all so far
  std::uintptr_t written_end = 0;  // of the written ones so far
  for (const Memory& memory : memories) {
    if (memory.begin < written_end || (memory.written && memory.begin < end)) {
      return true;
    }
    end = std::max(end, memory.end);
    written_end = memory.written ? std::max(written_end, memory.end) : written_end;
  }
  return false;
}

}  // namespace

bool WrittenTensors::is_written(std::size_t tensor) const noexcept {
  return std::any_of(ranges_.begin(), ranges_.begin() + count_, [tensor](const Range& range) {
    return tensor >= range.first && tensor < range.last;
  });
}

bool WrittenTensors::overlap(std::span<const at::Tensor* const> tensors) const noexcept {
  if (overfull_) {
    return true;
  }
  std::array<Memory, kInlineTensors> few;
  std::unique_ptr<Memory[]> many;  // NOLINT(modernize-avoid-c-arrays)
  Memory* memories = few.data();
  if (tensors.size() > few.size()) {
    many.reset(new (std::nothrow) Memory[tensors.size()]);
    if (!many) {
      return true;
    }
    memories = many.get();
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const c10::TensorImpl& impl = *tensors[i]->unsafeGetTensorImpl();
    const bool written = is_written(i);
    if (written && overlaps_itself(impl)) {
      return true;
    }
    memories[i] = memory_of(impl, written);
  }
  return any_meet({memories, tensors.size()});
}

}  // namespace eagercache
