#pragma once

// What the process has chosen: what a miss leads to, and which kernels may answer. Plain data. The
// runtime keeps it in one atomic, which every miss copies, so that it has to stay small.

#include <cstdint>

namespace eagercache {

// What a call leads to that has no kernel yet.
enum class OnMiss : std::uint8_t {
  kBackground,  // native answers; the store and the compile service are asked off the caller's path
  kWait,    // the caller of a key's first call waits for its kernel (native has answered already)
  kNative,  // the store is asked once a key, nothing is ever compiled
};

// Which validated kernels answer.
enum class Choose : std::uint8_t {
  kFaster,  // a kernel only where it is measured to be faster than native
  kAlways,  // every proved kernel; for tests and benchmarks
};

// How near to native a kernel has to be.
enum class Numerics : std::uint8_t {
  kAccurate,  // kernels of both numerics classes
  kBitwise,   // only kernels that equalled native bit for bit
};

struct Policy {
  OnMiss on_miss = OnMiss::kBackground;
  Choose choose = Choose::kFaster;
  Numerics numerics = Numerics::kAccurate;
  // This process is one of several that hold the same parameters: see computes_redundantly().
  bool replicas = false;
  // A key is handed to the compile service at this many missed calls (kBackground; kWait compiles
  // at the first).
  std::uint16_t compile_after = 2;
  // A few of the calls that kernels answer are timed, and native answers every second one of these.
  bool trials = false;
  // Calls that differ in sizes only share kernels with symbolic sizes.
  bool shape_classes = false;
};

}  // namespace eagercache
