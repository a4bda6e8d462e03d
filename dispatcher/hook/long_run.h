#pragma once

#include <cstdint>

namespace eagercache {

// Runs of calls that were decided for native, on one thread. In a long run most calls need not be
// looked at: a key is not made for them, and a new one among them is met a few calls later. The
// epoch tells runs under one policy from those under another; none is under 0.
inline constexpr std::uint32_t kLongRun = 1024;
// In a long run one call in so many is looked at.
inline constexpr std::uint32_t kSeenShare = 16;

// How long a run has become. One thread's own: no lock, no atomic.
class LongRun {
 public:
  // True when the next call need not be looked at; it is of the run then.
  bool passes(std::uint32_t epoch) noexcept {
    if (length_ < kLongRun || length_ % kSeenShare == 0 || epoch_ != epoch || epoch == 0)
        [[likely]] {
      return false;
    }
    ++length_;
    return true;
  }
  // A call that was looked at is of the run.
  void count(std::uint32_t epoch) noexcept {
    if (epoch_ != epoch) {
      *this = LongRun(epoch, 1);
    } else if (length_ < kLongRun + kSeenShare) {
      ++length_;
    } else if (length_ != kBarred) {
      length_ = kLongRun + 1;  // as far from the next look as after the first one
    }
  }
  // Under this epoch it is never long.
  void bar(std::uint32_t epoch) noexcept { *this = LongRun(epoch, kBarred); }
  // A call that was looked at is not decided.
  void end() noexcept {
    if (!is_barred()) {
      *this = LongRun();
    }
  }
  bool is_barred() const noexcept { return length_ == kBarred; }

  LongRun() = default;

 private:
  static constexpr std::uint32_t kBarred = UINT32_MAX & ~(kSeenShare - 1);

  LongRun(std::uint32_t epoch, std::uint32_t length) : epoch_(epoch), length_(length) {}

  std::uint32_t epoch_ = 0;
  std::uint32_t length_ = 0;
};

}  // namespace eagercache
