#include "dispatcher/kernels/container_frame.h"

#include <algorithm>
#include <functional>
#include <new>

namespace eagercache {
namespace {

// The innermost frame of the thread.
[[gnu::tls_model("initial-exec")]] constinit thread_local ContainerFrame* current = nullptr;

// Of container.py's SEAMS: each returns 0 where it has done what torch's function does.
using Make = std::int32_t (*)(std::int64_t, const std::int64_t*, const std::int64_t*, std::int32_t,
                              std::int32_t, std::int32_t, void**);
using Drop = std::int32_t (*)(void*);
using Connect = void (*)(Make, Drop);

}  // namespace

bool ContainerFrame::connect(const SharedLibrary& library) {
  const auto function = reinterpret_cast<Connect>(library.symbol("eagercache_connect"));
  if (function != nullptr) {
    function(&make, &drop);
  }
  return function != nullptr;
}

ContainerFrame::ContainerFrame(std::vector<Made>* noted) noexcept : outer_(current), noted_(noted) {
  current = this;
}

ContainerFrame::ContainerFrame(std::span<const Made> known,
                               std::span<const at::Tensor* const> inputs, void** handles) noexcept
    : outer_(current), known_(known) {
  for (const at::Tensor* input : inputs) {
    *handles++ = new (slots() + num_slots_) at::Tensor(*input);
    ++num_slots_;
  }
  current = this;
}

ContainerFrame::~ContainerFrame() {
  current = outer_;
  std::destroy_n(slots(), num_slots_);
}

bool ContainerFrame::has(const void* handle) const noexcept {
  const auto* const place = static_cast<const std::byte*>(handle);
  // Pointers into different objects are in no order for "<".
  return std::greater_equal<>()(place, memory_.data()) &&
         std::less<>()(place, memory_.data() + memory_.size());
}

std::int32_t ContainerFrame::make(std::int64_t dimensions, const std::int64_t* sizes,
                                  const std::int64_t* strides, std::int32_t dtype,
                                  std::int32_t device_type, std::int32_t /*device_index*/,
                                  void** handle) noexcept {
  constexpr auto kCpu = static_cast<std::int32_t>(c10::DeviceType::CPU);
  if (current == nullptr || device_type != kCpu) {
    return 1;
  }
  const auto count = static_cast<std::size_t>(dimensions);
  const auto type = static_cast<c10::ScalarType>(dtype);
  try {
    if (current->noted_ != nullptr) [[unlikely]] {
      current->note(type, {sizes, count}, {strides, count});
      return 1;
    }
    return current->allocate(type, {sizes, count}, {strides, count}, handle) ? 0 : 1;
  } catch (...) {
    return 1;  // torch may say why
  }
}

std::int32_t ContainerFrame::drop(void* handle) noexcept {
  if (current == nullptr || !current->has(handle)) {
    return 1;
  }
  static_cast<at::Tensor*>(handle)->reset();
  return 0;
}

bool ContainerFrame::allocate(c10::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
                              void** handle) {
  if (num_slots_ == kMostHandles) {
    return false;
  }
  for (const Made& made : known_) {
    if (made.is(dtype, sizes, strides)) {
      *handle = new (slots() + num_slots_) at::Tensor(made.spec.allocate());
      ++num_slots_;
      return true;
    }
  }
  return false;
}

void ContainerFrame::note(c10::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const bool is_there = std::ranges::any_of(
      *noted_, [&](const Made& made) { return made.is(dtype, sizes, strides); });
  if (!is_there && noted_->size() < kMostMade) {
    noted_->push_back({dtype, sizes.vec(), strides.vec()});
  }
}

}  // namespace eagercache
