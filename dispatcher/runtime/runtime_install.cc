// Runtime: from an entry of the store to a verdict in an operator's table, and to what people are
// told of it.

#include <utility>

#include "dispatcher/base/log.h"
#include "dispatcher/kernels/numerics_rule.h"
#include "dispatcher/runtime/call_text.h"
#include "dispatcher/runtime/counted.h"
#include "dispatcher/runtime/denied_call.h"
#include "dispatcher/runtime/runtime.h"

namespace eagercache {
namespace {

// Verdicts remembered for people, per operator and in all.
constexpr std::size_t kMaxVerdicts = 4'096;
constexpr std::size_t kMaxAllVerdicts = 16'384;

}  // namespace

// kNotFound also where there is no store, or the digest is none.
Result<Manifest> Runtime::find_entry(const std::string& digest) const {
  const std::shared_ptr<DiskStore> files = store();
  const std::optional<Digest> key = Digest::from_hex(digest);
  if (!files || !key) {
    return Status(StatusCode::kNotFound, "");
  }
  return files->find(*key);
}

// The entry is not to be used by anybody any more.
void Runtime::put_aside(const std::string& digest, const std::string& reason) const {
  const std::optional<Digest> key = Digest::from_hex(digest);
  if (const std::shared_ptr<DiskStore> files = store(); files && key) {
    if (Status status = files->quarantine(*key, reason);
        !status && status.code() != StatusCode::kNotFound) {
      log_line(LogLevel::kWarning, status.to_string());
    }
  }
  std::shared_ptr<MissHandler> handler;
  {
    const Lock lock(registry_mutex_);
    handler = handler_;
  }
  if (handler) {
    handler->note_put_aside(digest, reason);
  }
}

bool Runtime::install_from_store(OperatorHook& hook, std::span<const Word> words,
                                 std::uint64_t hash, const std::string& digest, Found* found) {
  const std::shared_ptr<DiskStore> files = store();
  if (!files) {
    return false;
  }
  const std::uint64_t generation = verdict_generation.load(std::memory_order_acquire);
  const std::optional<Digest> key = Digest::from_hex(digest);
  Result<Manifest> manifest = files->find(*key);
  if (!manifest) {
    if (manifest.code() != StatusCode::kNotFound) {
      warn_once("store:" + std::string(status_code_name(manifest.code())),
                "the kernel store cannot be read (" + manifest.status().to_string() +
                    "); calls stay native");
    }
    return false;
  }
  *found = install(hook, words, hash, manifest.value());
  if (generation != verdict_generation.load(std::memory_order_acquire)) {
    // The policy changed meanwhile and cleared the tables; this verdict belongs to the old one.
    hook.table().erase(words, hash);
    *found = {EntryState::kPending, nullptr};
  }
  return found->state == EntryState::kKernel || found->state == EntryState::kNative;
}

std::string Runtime::rejected_by_policy(const OperatorHook& hook, std::span<const Word> words,
                                        const Manifest& manifest) const {
  if (std::string denial = denied_call(hook, words); !denial.empty()) {
    return denial;
  }
  DecodedCall call;
  const bool known = decode_call(words, &call);
  return numerics_refusal(manifest.fact("numerics"), policy().numerics,
                          known && call.state.deterministic,
                          hook.writes_in(call) && !hook.writes_statistics());
}

LoadedKernel* Runtime::for_replicas(LoadedKernel* kernel, const Manifest& manifest) {
  if (!policy().replicas || manifest.fact("numerics") == "bitwise") {
    return kernel;
  }
  const Lock lock(registry_mutex_);
  LoadedKernel*& guarded = replica_kernels_[kernel];
  if (guarded == nullptr) {
    guarded = make_replica_kernel(kernel);
  }
  return guarded;
}

Runtime::EntryKernel Runtime::kernel_of(OperatorHook& hook, std::span<const Word> words,
                                        const Manifest& manifest) {
  if (manifest.kind != EntryKind::kKernel) {
    return {.decision = manifest.kind == EntryKind::kNative ? "native" : "failed",
            .reason = manifest.fact("reason")};
  }
  if (std::string reason = rejected_by_policy(hook, words, manifest); !reason.empty()) {
    return {.decision = "native", .reason = std::move(reason)};
  }
  Result<LoadedKernel*> kernel = load_kernel(hook, words, manifest);
  if (!kernel) {
    return {.decision = "failed", .reason = kernel.status().message(), .loaded = kernel.status()};
  }
  return {.kernel = kernel.value()};
}

Found Runtime::install(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                       const Manifest& manifest) {
  EntryKernel entry = kernel_of(hook, words, manifest);
  switch (entry.loaded.code()) {
    case StatusCode::kOk:
      break;
    case StatusCode::kCorrupt:
      // Quarantined: the key is a miss again and may be compiled anew.
      log_line(LogLevel::kWarning,
               hook.full_name() + ": a damaged kernel was put aside (" + entry.reason + ")");
      return {EntryState::kPending, nullptr};
    case StatusCode::kFull:
      warn_once("full", entry.reason + "; further keys stay native");
      entry.decision = "native";
      break;
    default:
      entry.reason = entry.loaded.to_string();
      log_line(LogLevel::kWarning, hook.full_name() + ": a stored kernel cannot be used (" +
                                       entry.reason + "); native answers");
  }
  if (entry.kernel == nullptr) {
    install_native(hook, words, hash, entry.decision, entry.reason, manifest.facts);
    if (manifest.kind != EntryKind::kKernel) {
      ask_again(hook, words, hash, manifest);
    }
    return {EntryState::kNative, nullptr};
  }
  LoadedKernel* const answers = for_replicas(entry.kernel, manifest);
  if (!put_kernel(hook, words, hash, answers)) {
    return {EntryState::kPending, nullptr};
  }
  record(hook, words, {manifest.key.hex(), {}, "kernel", {}, manifest.facts});
  ask_again(hook, words, hash, manifest);
  return {EntryState::kKernel, answers};
}

bool Runtime::put_kernel(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                         const void* kernel) {
  return put_unless_frozen([&] { hook.table().set_kernel(words, hash, kernel); });
}

bool Runtime::put_unless_frozen(const std::function<void()>& put) {
  const Counted counted(installing_);
  if (frozen()) {
    return false;
  }
  put();
  return true;
}

void Runtime::install_native(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                             const std::string& decision, const std::string& reason,
                             const std::map<std::string, std::string>& facts) {
  hook.table().set_native(words, hash);
  record(hook, words, {hook.entry_digest(words, policy_tag()).hex(), {}, decision, reason, facts});
}

void Runtime::record(OperatorHook& hook, std::span<const Word> words, VerdictRecord verdict) {
  verdict.call_json = describe_call(words, hook.plan().names);
  log_event(LogLevel::kInfo, "verdict",
            {{"op", hook.full_name()},
             {"decision", verdict.decision},
             {"digest", verdict.digest},
             {"reason", verdict.reason}});
  const Lock lock(verdicts_mutex_);
  auto& known = verdicts_[&hook];
  const bool has_room = known.size() < kMaxVerdicts && verdict_count_ < kMaxAllVerdicts;
  if (has_room || known.contains(verdict.digest)) {
    std::string digest = verdict.digest;
    verdict_count_ += known.insert_or_assign(std::move(digest), std::move(verdict)).second;
  }
}

}  // namespace eagercache
