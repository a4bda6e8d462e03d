// Runtime: verdicts that noise hid. Native answers such a key, and the compile service is asked to
// measure it again when the machine is idle. Nobody waits for that; at the third time the verdict
// is final.

#include <charconv>
#include <nlohmann/json.hpp>
#include <utility>

#include "dispatcher/base/log.h"
#include "dispatcher/runtime/call_text.h"
#include "dispatcher/runtime/runtime.h"

namespace eagercache {
namespace {

constexpr int kMostMeasurements = 3;
constexpr const char* kMeasured = "measured";  // a fact of an undecided verdict: how often
// Held for an idle moment at a time; others are asked for by a later process.
constexpr std::size_t kMostHeld = 256;

// 0 where the text is none.
int number_of(const std::string& text) {
  int number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

}  // namespace

void Runtime::measure_again(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                            const Manifest& manifest) {
  const int measured = number_of(manifest.fact(kMeasured));
  if (manifest.kind != EntryKind::kNative || measured < 1 || measured >= kMostMeasurements ||
      policy().on_miss == OnMiss::kNative || frozen()) {
    return;
  }
  Pending pending;
  pending.hook = &hook;
  pending.words.assign(words.begin(), words.end());
  pending.hash = hash;
  pending.generation = verdict_generation.load(std::memory_order_relaxed);
  pending.measured = measured;
  {
    std::lock_guard lock(queue_mutex_);
    // Without a loader this is the first key's load on a caller's path: a later process asks.
    if (stopping_ || !loader_.joinable() || again_.size() >= kMostHeld) {
      return;
    }
    queue_.push_back(std::move(pending));
  }
  queue_changed_.notify_all();
}

void Runtime::submit_again(Pending pending) {
  OperatorHook& hook = *pending.hook;
  CompileRequest request;
  request.digest = hook.entry_digest(pending.words, policy_tag()).hex();
  nlohmann::json call =
      nlohmann::json::parse(operator_call_json(hook, pending.words, request.digest, 1, 0));
  call["again"] = pending.measured;
  request.call_json = call.dump();
  std::shared_ptr<MissHandler> handler;
  {
    std::lock_guard lock(registry_mutex_);
    handler = handler_;
  }
  if (!handler) {
    return;
  }
  {
    std::lock_guard lock(queue_mutex_);
    if (stopping_ || !again_.emplace(request.digest, std::move(pending)).second) {
      return;
    }
  }
  try {
    handler->submit(request);
  } catch (const std::exception& error) {
    log_line(LogLevel::kWarning, std::string("a verdict is not measured again: ") + error.what());
    std::lock_guard lock(queue_mutex_);
    again_.erase(request.digest);
  }
}

// The service is done with a key that was measured again: what the store has now is the verdict.
void Runtime::complete_again(const std::string& digest) {
  Pending pending;
  {
    std::lock_guard lock(queue_mutex_);
    auto found = again_.extract(digest);
    if (found.empty()) {
      return;
    }
    pending = std::move(found.mapped());
  }
  if (pending.generation != verdict_generation.load(std::memory_order_relaxed) || frozen()) {
    return;
  }
  try {
    const Result<Manifest> manifest = find_entry(digest);
    // The same measurement as before: the service could not make another one.
    if (manifest && number_of(manifest.value().fact(kMeasured)) != pending.measured) {
      install(*pending.hook, pending.words, pending.hash, manifest.value());
    }
  } catch (const std::exception& error) {
    log_line(LogLevel::kWarning, std::string("a verdict could not be installed: ") + error.what());
  }
}

}  // namespace eagercache
