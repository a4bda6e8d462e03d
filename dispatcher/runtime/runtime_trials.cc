// Runtime: a kernel that loses in the program's own calls (call_trials.h). Native answers its key
// from now on, and the store keeps that for the next processes of this kind of machine.

#include <exception>
#include <utility>

#include "dispatcher/base/log.h"
#include "dispatcher/runtime/counted.h"
#include "dispatcher/runtime/runtime.h"

namespace eagercache {
namespace {

std::map<std::string, std::string> facts_of(const TrialTimes& times) {
  return {{"native_ns", std::to_string(times.native_ns)},
          {"kernel_ns", std::to_string(times.kernel_ns)},
          {"reason", "in the program's own calls native is faster"}};
}

}  // namespace

void Runtime::note_lost_trial(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                              const TrialTimes& times) noexcept {
  const Counted asking(asking_);
  if (exiting_.load() || frozen()) {
    return;
  }
  try {
    const std::map<std::string, std::string> facts = facts_of(times);
    install_native(hook, words, hash, "native", facts.at("reason"), facts);
    Pending pending;
    pending.hook = &hook;
    pending.words.assign(words.begin(), words.end());
    pending.hash = hash;
    pending.generation = verdict_generation.load(std::memory_order_relaxed);
    pending.lost = times;
    queue(std::move(pending));
  } catch (const std::exception&) {
    // Out of memory: native answers, or the kernel goes on.
  }
}

void Runtime::keep_lost_trial(const Pending& pending) {
  const std::string digest = pending.hook->entry_digest(pending.words, policy_tag()).hex();
  const std::shared_ptr<DiskStore> files = store();
  Result<Manifest> manifest = find_entry(digest);
  // A key that a class's kernel answers has no entry of its own. A decision or a failure stays.
  if (!files || files->read_only() || !manifest || manifest.value().kind != EntryKind::kKernel) {
    return;
  }
  Manifest lost = std::move(manifest.value());
  lost.kind = EntryKind::kNative;
  lost.objects.clear();
  lost.cpu_features.clear();
  lost.facts.erase("search");
  for (auto& [name, value] : facts_of(*pending.lost)) {
    lost.facts[name] = std::move(value);
  }
  Status status = files->remove(lost.key);
  if (status) {
    status = files->publish(std::move(lost), {}).status();
  }
  if (!status) {
    log_line(LogLevel::kInfo, "a trial's outcome is not kept: " + status.to_string());
  }
}

}  // namespace eagercache
