#include "dispatcher/deployed/weight_set.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/hook/inside_guard.h"

namespace eagercache {

WeightSet::~WeightSet() {
  std::vector<c10::Stream> streams;
  {
    const Lock lock(mutex_);
    streams.swap(streams_);
  }
  if (streams.empty()) {
    return;
  }
  try {
    const InsideGuard inside;
    for (const at::Tensor& value : values) {
      for (const c10::Stream& stream : streams) {
        if (value.defined()) {
          value.record_stream(stream);
        }
      }
    }
  } catch (...) {
    // Where the device is lost nothing is computed with the memory any more.
  }
}

void WeightSet::read_on(c10::Device device) const {
  if (device.is_cpu()) {
    return;
  }
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const Lock lock(mutex_);
  if (std::ranges::find(streams_, stream) == streams_.end()) {
    streams_.push_back(stream);
  }
}

struct BesideRequests::Switched {
  explicit Switched(c10::Stream stream) : current(stream), guard(behind_current(stream)) {}

  // `stream`, which then waits for what the thread's current one was given.
  static c10::Stream behind_current(c10::Stream stream) {
    c10::Event given(stream.device_type());
    given.record(c10::impl::VirtualGuardImpl(stream.device_type()).getStream(stream.device()));
    given.block(stream);
    return stream;
  }

  const RelaxedCapture relaxed;  // other threads may capture meanwhile
  const c10::Stream current;
  const c10::StreamGuard guard;
};

BesideRequests::BesideRequests(const std::optional<c10::Stream>& stream)
    : switched_(stream ? std::make_unique<Switched>(*stream) : nullptr) {}

BesideRequests::~BesideRequests() {
  try {
    finish();  // what failed half-way reads tensors of the caller's, too
  } catch (...) {
    // A device that is lost: the next call reports it.
  }
}

void BesideRequests::finish() {
  if (switched_ != nullptr) {
    switched_->current.synchronize();
  }
}

bool is_aligned_on(c10::Device device, const at::Tensor& value) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(value.unsafeGetTensorImpl()->data());
  return device.is_cpu() || address % kGpuAlignment == 0;
}

std::optional<c10::Stream> update_stream(c10::Device device) {
  if (device.is_cpu()) {
    return std::nullopt;
  }
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

}  // namespace eagercache
