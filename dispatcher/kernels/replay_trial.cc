#include "dispatcher/kernels/replay_trial.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace eagercache {
namespace {

// A replay may be so much slower on the device, for what it spares the host.
constexpr float kNoSlower = 1.02F;

float median_of(std::vector<ReplayTrial::Times> samples, float ReplayTrial::Times::*part) {
  const auto middle = samples.begin() + static_cast<std::ptrdiff_t>(samples.size() / 2);
  std::nth_element(samples.begin(), middle, samples.end(),
                   [part](const auto& a, const auto& b) { return a.*part < b.*part; });
  return (*middle).*part;
}

}  // namespace

ReplayTrial::Call* ReplayTrial::begin(void* stream) noexcept {
  const bool replayed = std::exchange(replays_next_, !replays_next_);
  if (calls_.size() >= kInFlight) {
    return nullptr;
  }
  try {
    Call& call = calls_.emplace_back();
    call.replayed_ = replayed;
    if (!call.timer_.begin(stream)) {
      calls_.pop_back();
      return nullptr;
    }
    call.began_ = std::chrono::steady_clock::now();
    return &call;
  } catch (...) {
    return nullptr;  // out of memory
  }
}

void ReplayTrial::end(Call* call, void* stream) noexcept {
  if (call != nullptr) {
    const std::chrono::duration<float, std::milli> host =
        std::chrono::steady_clock::now() - call->began_;
    call->host_ = host.count();
    call->lost_ = !call->timer_.end(stream);
    call->ended_ = true;
  }
}

void ReplayTrial::add(bool replayed, Times times) { samples_[replayed ? 1 : 0].push_back(times); }

ReplayTrial::Verdict ReplayTrial::verdict() noexcept {
  try {
    while (!calls_.empty() && calls_.front().ended_) {
      const Call& call = calls_.front();
      if (!call.lost_) {
        const std::optional<float> device = call.timer_.elapsed();
        if (!device.has_value()) {
          break;
        }
        add(call.replayed_, {*device, call.host_});
      }
      calls_.pop_front();
    }
    // The first of each kind brings code and memory to where it is used.
    if (std::min(samples_[0].size(), samples_[1].size()) <= kSamples) {
      return Verdict::kOpen;
    }
    for (std::size_t kind = 0; kind < samples_.size(); ++kind) {
      const std::vector<Times> warm(samples_[kind].begin() + 1, samples_[kind].end());
      median_[kind] = {median_of(warm, &Times::device), median_of(warm, &Times::host)};
    }
  } catch (...) {
    return Verdict::kOpen;
  }
  const bool faster =
      replayed().device <= run().device * kNoSlower && replayed().host <= run().host * kNoSlower;
  return faster ? Verdict::kReplay : Verdict::kRun;
}

}  // namespace eagercache
