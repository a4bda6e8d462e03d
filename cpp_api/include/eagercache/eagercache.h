#pragma once

// eagercache in programs without a Python interpreter: kernels that Python compiled, proved and
// timed answer operator calls of a LibTorch program. Nothing is compiled here, no process is
// started, and no compiler is needed.
//
//     eagercache::EnableOptions options;
//     options.store = "/var/cache/my_service";
//     options.bundle = "kernels.bundle";
//     options.trusted_keys = {"release.pub"};
//     if (const auto enabled = eagercache::enable(options); !enabled) {
//       std::cerr << enabled.reason << '\n';  // the program goes on, natively
//     }
//
// No function throws, but for std::bad_alloc. All may be called from any thread. A process uses
// eagercache from C++ or from Python, not both.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#define EAGERCACHE_API __attribute__((visibility("default")))

namespace eagercache {

// Of the environment variables that the documentation lists, these are heard: EAGERCACHE_DISABLE,
// _DIR, _SKIP, _CHOOSE, _NUMERICS, _MAX_BYTES, _TIERS, _ALLOW_UNTRUSTED, _REVOKED, _LOG and
// _VERIFY. A malformed one is said on standard error and ignored.
struct EnableOptions {
  // The folder of kernels and decisions, as Python's enable(cache_dir=...) takes it; EAGERCACHE_DIR
  // when empty. Must belong to the user and be writable by nobody else. Made when a bundle is
  // given.
  std::filesystem::path store;
  // Sixteen hex digits, the name of one of the store's environments; empty: the one with the most
  // entries of those whose kernels can run in this process.
  std::string environment;
  // A file of `eagercache bundle export`: all of it is checked, then published into the store, then
  // used. What the store has of it stays as it is.
  std::filesystem::path bundle;
  // Ed25519 public keys (PEM), one of which must have signed the bundle.
  std::vector<std::filesystem::path> trusted_keys;
  // A list of keys and bundles that are not to be used any more, one a line (64 hexadecimal
  // digits); EAGERCACHE_REVOKED when empty. A list that cannot be read refuses everything. Kernels
  // that a revoked bundle or one that has expired brought into the store are not used either: one
  // warning says so.
  std::filesystem::path revoked;
  // Operators to hook: "aten::var.correction", or "aten::var" for all of its overloads. Empty:
  // those of which the store itself has a kernel; what EAGERCACHE_TIERS have is not listed for it.
  std::vector<std::string> operators;
  std::vector<std::string> skip;
  // Use every proved kernel, also where native was as fast: entries of Python's choose="always".
  bool always = false;
  // Only kernels that equalled native bit for bit.
  bool bitwise = false;
  // Who answers the first call of a kind (operator, dtypes, sizes, strides, threads of torch ...).
  // False: the kernel; the calling thread reads, verifies and loads it, which takes a millisecond
  // or so. True: native, as all calls until a thread of ours has loaded it.
  bool load_in_background = false;
  // Load the kernels of all hooked operators before enable() returns, a millisecond or so each, so
  // that no call waits for one. Kernels for all sizes of a kind are loaded by the first call even
  // so.
  bool preload = false;
  // Write nothing into the store; refuses a bundle.
  bool read_only = false;
};

// Whether kernels answer from now on, out of which store, and why not otherwise. Native goes on in
// either case.
struct EnableResult {
  bool enabled = false;
  // One line: what is wrong and what to do. Empty when enabled.
  std::string reason;
  // Of the reason: "disabled", "refused", "corrupt", "incompatible", "not_found",
  // "invalid_argument" and other names of what may be wrong with files. Empty when enabled.
  std::string code;
  std::filesystem::path store;
  std::string environment;  // sixteen hex digits
  std::string signer;       // of the bundle: its public key in hex digits
  // Entries of the environment: kernels, and decisions for native.
  std::uint64_t kernels = 0;
  std::uint64_t decisions = 0;
  std::vector<std::string> operators;  // hooked: "aten::var.correction at CPU"
  std::vector<std::string> left_out;   // not hooked, each with the reason

  explicit operator bool() const noexcept { return enabled; }
};

// Lets the store's kernels answer from now on, in all threads. When it fails, nothing has changed
// and every call stays native. Called again, the newest call's store, operators and choices hold.
EAGERCACHE_API EnableResult enable(const EnableOptions& options);

// Native answers every call until the next enable(). Kernels that are running finish.
EAGERCACHE_API void disable() noexcept;

// The calls of one hooked operator on one device. Each call is counted once.
struct OperatorStatistics {
  std::string op;             // "aten::var.correction"
  std::string dispatch_key;   // "CPU" or "CUDA"
  std::uint64_t hits = 0;     // calls that a kernel answered
  std::uint64_t misses = 0;   // first calls of a kind
  std::uint64_t pending = 0;  // calls while a kernel is being loaded
  std::uint64_t native = 0;   // calls without a kernel: decided, or not in the store
  std::uint64_t aside = 0;  // calls that no kernel may answer (subclasses, overlapping writes ...)
};

// Those of all hooked operators.
struct Statistics {
  // Sums over the operators.
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;
  std::uint64_t pending = 0;
  std::uint64_t native = 0;
  std::uint64_t aside = 0;
  std::size_t kernels_loaded = 0;
  std::vector<OperatorStatistics> operators;
};

// What became of the calls of hooked operators since the process began. Takes microseconds; calls
// made meanwhile may be missing.
EAGERCACHE_API Statistics statistics();

// What was decided for one kind of call.
struct KernelVerdict {
  std::string op;
  std::string dispatch_key;
  std::string decision;  // "kernel", "native" or "failed"
  std::string reason;    // why not a kernel
  std::string call;      // the call's form, as JSON
};

// What was decided for each kind of call that was met; at most 16,384 of them are remembered.
EAGERCACHE_API std::vector<KernelVerdict> verdicts();

// With load_in_background: waits until nothing is left to load, for up to `seconds`; true when so.
EAGERCACHE_API bool wait_until_loaded(double seconds);

// Native answers, the loading thread has ended. There is no enable() after it. A program that ends
// without it waits at its exit for what is being loaded.
EAGERCACHE_API void shut_down() noexcept;

// What a bundle holds, and whether this process could use it.
struct BundleCheck {
  bool usable = false;
  std::string reason;        // why not, in one line
  std::string code;          // as EnableResult's
  std::string signer;        // the key's id: 64 hexadecimal digits
  std::string digest;        // the bundle's, by which it can be revoked
  std::int64_t created = 0;  // seconds since 1970
  std::int64_t expires = 0;  // likewise; 0: never
  std::uint64_t kernels = 0;
  std::uint64_t decisions = 0;

  explicit operator bool() const noexcept { return usable; }
};

// Checks all of a bundle, and that its kernels can run in this process; writes nothing. `revoked`
// as in EnableOptions.
EAGERCACHE_API BundleCheck check_bundle(const std::filesystem::path& bundle,
                                        const std::vector<std::filesystem::path>& trusted_keys,
                                        const std::filesystem::path& revoked = {});

// What bundles and stores are compared with: one line "field: value" for each thing that kernels
// meet when they run.
EAGERCACHE_API std::string running_environment();

// "0.1.0"
EAGERCACHE_API const char* version() noexcept;

}  // namespace eagercache
