#include "dispatcher/observe/verification.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <thread>
#include <vector>

#include "dispatcher/hook/call_observer.h"

namespace eagercache {
namespace {

constexpr double kUlps = 1024.0;
constexpr double kAll = 4294967296.0;  // 2^32

std::atomic<std::uint64_t> checked_share{0};  // of 2^32

std::uint32_t next_random() noexcept {
  thread_local std::uint64_t state =
      std::hash<std::thread::id>{}(std::this_thread::get_id()) | std::uint64_t{1};
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return static_cast<std::uint32_t>(state >> 32);
}

double unit_of(c10::ScalarType dtype) {
  switch (c10::toRealValueType(dtype)) {
    case c10::ScalarType::Half:
      return std::numeric_limits<c10::Half>::epsilon();
    case c10::ScalarType::BFloat16:
      return std::numeric_limits<c10::BFloat16>::epsilon();
    case c10::ScalarType::Float:
      return std::numeric_limits<float>::epsilon();
    default:
      return std::numeric_limits<double>::epsilon();
  }
}

std::string difference(const at::Tensor& kernel, const at::Tensor& native) {
  if (kernel.defined() != native.defined()) {
    return "one is undefined";
  }
  if (!native.defined()) {
    return {};
  }
  if (kernel.scalar_type() != native.scalar_type() || kernel.sizes() != native.sizes() ||
      kernel.strides() != native.strides()) {
    return "another dtype, size or stride";
  }
  if (!at::isFloatingType(native.scalar_type()) && !at::isComplexType(native.scalar_type())) {
    return at::equal(kernel, native) ? std::string() : std::string("other values");
  }
  const at::Tensor magnitudes = native.abs().to(at::kDouble);
  const at::Tensor finite = at::where(magnitudes.isfinite(), magnitudes, 0.0);
  const double largest = finite.numel() == 0 ? 0.0 : finite.max().item<double>();
  // 1024 units of a half-precision number are larger than the number.
  const double ulps =
      native.scalar_type() == at::kBFloat16 || native.scalar_type() == at::kHalf ? 16.0 : kUlps;
  const double allowed = ulps * unit_of(native.scalar_type()) * largest;
  const bool complex = at::isComplexType(native.scalar_type());
  const auto wide = complex ? at::kComplexDouble : at::kDouble;
  return at::allclose(kernel.to(wide), native.to(wide), 0.0, allowed, /*equal_nan=*/true)
             ? std::string()
             : std::string("other values");
}

std::string difference(const c10::IValue& kernel, const c10::IValue& native) {
  if (!native.isTensorList()) {
    return difference(kernel.toTensor(), native.toTensor());
  }
  const std::vector<at::Tensor> mine = kernel.toTensorVector();
  const std::vector<at::Tensor> natives = native.toTensorVector();
  if (mine.size() != natives.size()) {
    return "another number of tensors";
  }
  for (std::size_t i = 0; i < mine.size(); ++i) {
    if (std::string found = difference(mine[i], natives[i]); !found.empty()) {
      return found;
    }
  }
  return {};
}

// What hooks ask, without knowing how answers are compared.
class Verifier final : public AnswerVerifier {
 public:
  bool chooses() noexcept override { return verification_chosen(); }
  std::string difference(const torch::jit::Stack& kernel, const torch::jit::Stack& native,
                         std::size_t count) override {
    return difference_from_native(kernel, native, count);
  }
};

constinit Verifier process_verifier;

}  // namespace

void set_verification_share(double share) noexcept {
  const double bounded = share > 0 ? std::min(share, 1.0) : 0.0;  // NaN is off
  const auto checked = static_cast<std::uint64_t>(bounded * kAll);
  checked_share.store(checked, std::memory_order_relaxed);
  answer_verifier.store(checked != 0 ? &process_verifier : nullptr, std::memory_order_relaxed);
}

bool verification_chosen() noexcept {
  const std::uint64_t limit = checked_share.load(std::memory_order_relaxed);
  return limit != 0 && next_random() < limit;
}

std::string difference_from_native(const at::Tensor& kernel, const at::Tensor& native) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return difference(kernel, native);
}

std::string difference_from_native(const torch::jit::Stack& kernel, const torch::jit::Stack& native,
                                   std::size_t count) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t i = 1; i <= count; ++i) {
    std::string found = difference(kernel[kernel.size() - i], native[native.size() - i]);
    if (!found.empty()) {
      return "output " + std::to_string(count - i) + ": " + found;
    }
  }
  return {};
}

}  // namespace eagercache
