#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "dispatcher/base/locks.h"

namespace eagercache {

// Bytes of which a tensor's address is a multiple, for vector loads of code that was generated for
// a GPU.
inline constexpr std::uintptr_t kGpuAlignment = 16;

// One whole version of a module's constants. Its values never change: an update makes another one,
// and whoever holds this one computes with it to the end.
class WeightSet {
 public:
  WeightSet(std::uint64_t number, std::vector<at::Tensor> rows)
      : version(number), values(std::move(rows)) {}
  // On a GPU calls return before they are computed: the memory of the values is used for nothing
  // else before the streams that read them are through with what they were given until now. Nobody
  // waits for that.
  ~WeightSet();
  WeightSet(const WeightSet&) = delete;
  WeightSet& operator=(const WeightSet&) = delete;

  // Says, before it does, that the thread reads the values on its current stream of `device`.
  // Nothing on the CPU.
  void read_on(c10::Device device) const;

  const std::uint64_t version;  // 1 for the artifact's own, then counted up; never used again
  const std::vector<at::Tensor> values;  // a row for each constant, the folded ones too

 private:
  mutable Mutex mutex_;  // held for a look at a few streams
  mutable std::vector<c10::Stream> streams_ EAGERCACHE_GUARDED_BY(mutex_);
};
using WeightSetPtr = std::shared_ptr<const WeightSet>;

// While it lives, what the thread does with weights on a GPU goes to `stream` in the place of its
// current one, behind what that has been given: requests on the latter do not wait for it. Nothing
// where there is no stream, on the CPU. Not while the thread's stream is captured.
class BesideRequests {
 public:
  explicit BesideRequests(const std::optional<c10::Stream>& stream);
  ~BesideRequests();
  BesideRequests(const BesideRequests&) = delete;
  BesideRequests& operator=(const BesideRequests&) = delete;

  // Waits until all of it is done, so that any stream may read what was made. Throws what the
  // device reports.
  void finish();

 private:
  struct Switched;
  std::unique_ptr<Switched> switched_;
};

// Whether a tensor lies in the memory of `device` as code that was generated for one relies on.
bool is_aligned_on(c10::Device device, const at::Tensor& value) noexcept;

// A stream for updates of weights on `device`; none on the CPU.
std::optional<c10::Stream> update_stream(c10::Device device);

}  // namespace eagercache
