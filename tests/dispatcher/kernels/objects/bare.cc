// Kernels as a launch plan calls them.
#include <cstdint>
#include <stdexcept>

extern "C" {

// Tests put an entry's contract in the place of the digits (HookTest::object_made_for).
__attribute__((visibility("default"), used)) char eagercache_made_for[] =
    "0000000000000000000000000000000000000000000000000000000000000000\n";

// out = 2 * in, five floats, through a scratch buffer.
__attribute__((visibility("default"))) std::int32_t eagercache_kernel_2a(void* const* p) {
  const auto* in = static_cast<const float*>(p[0]);
  auto* out = static_cast<float*>(p[1]);
  auto* scratch = static_cast<float*>(p[2]);
  for (int i = 0; i < 5; ++i) scratch[i] = in[i];
  for (int i = 0; i < 5; ++i) out[i] = scratch[i] + in[i];
  return 0;
}

// Two outputs of six elements: the addresses of both scratch buffers, modulo 64, and their
// distance.
__attribute__((visibility("default"))) std::int32_t eagercache_kernel_2b(void* const* p) {
  auto* first = static_cast<std::int64_t*>(p[0]);
  auto* second = static_cast<std::int64_t*>(p[1]);
  for (int i = 0; i < 6; ++i) {
    first[i] = static_cast<std::int64_t>(
        (reinterpret_cast<std::uintptr_t>(p[2]) | reinterpret_cast<std::uintptr_t>(p[3])) % 64);
    second[i] = static_cast<char*>(p[3]) - static_cast<char*>(p[2]);
  }
  static_cast<char*>(p[2])[99'999] = 1;
  static_cast<char*>(p[3])[7] = 1;
  return 0;
}

// The second input = the sum of both, five floats.
__attribute__((visibility("default"))) std::int32_t eagercache_kernel_2c(void* const* p) {
  const auto* in = static_cast<const float*>(p[0]);
  auto* out = static_cast<float*>(p[1]);
  for (int i = 0; i < 5; ++i) out[i] = in[i] + out[i];
  return 0;
}

// The last of 200 inputs = the sum of the others, of one float each, in scratch.
__attribute__((visibility("default"))) std::int32_t eagercache_kernel_2d(void* const* p) {
  auto* scratch = static_cast<float*>(p[200]);
  *scratch = 0;
  for (int i = 0; i < 199; ++i) *scratch += *static_cast<const float*>(p[i]);
  *static_cast<float*>(p[199]) = *scratch;
  return 0;
}

// out = in * the first number + the second, five floats.
__attribute__((visibility("default"))) std::int32_t eagercache_kernel_2e(void* const* p,
                                                                         const double* s) {
  const auto* in = static_cast<const float*>(p[0]);
  auto* out = static_cast<float*>(p[1]);
  for (int i = 0; i < 5; ++i) out[i] = in[i] * static_cast<float>(s[0]) + static_cast<float>(s[1]);
  return 0;
}

__attribute__((visibility("default"))) std::int32_t eagercache_kernel_fa(void* const*) { return 1; }

__attribute__((visibility("default"))) std::int32_t eagercache_kernel_fb(void* const*) { return 2; }
}
