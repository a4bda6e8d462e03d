// Runtime: verdicts that are not the last word. Noise hid what is faster: native answers such a
// key, and the compile service is asked to measure it again; at the third time the verdict is
// final. Or a kernel was made at once whose other forms may be faster: the service is asked to
// search among them. Both wait until the machine is idle, and nobody waits for them.

#include <charconv>
#include <utility>

#include "dispatcher/base/log.h"
#include "dispatcher/runtime/call_text.h"
#include "dispatcher/runtime/runtime.h"

namespace eagercache {
namespace {

constexpr int kMostMeasurements = 3;
constexpr const char* kMeasured = "measured";  // a fact of an undecided verdict: how often
constexpr const char* kSearch = "search";      // a fact of a kernel: "due" where none was made
// Held for an idle moment at a time; others are asked for by a later process.
constexpr std::size_t kMostHeld = 256;

// 0 where the text is none.
int number_of(const std::string& text) {
  int number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

// What is still to be done for an entry with a verdict, as a request says it: so often it was
// measured, or that forms of its kernel are to be searched. Empty for most.
std::string left_to_do(const Manifest& manifest) {
  if (manifest.fact(kSearch) == "due") {
    return kSearch;
  }
  const int measured = number_of(manifest.fact(kMeasured));
  if (manifest.kind == EntryKind::kNative && measured >= 1 && measured < kMostMeasurements) {
    return std::to_string(measured);
  }
  return {};
}

}  // namespace

void Runtime::ask_again(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                        const Manifest& manifest) {
  std::string again = left_to_do(manifest);
  if (again.empty() || policy().on_miss == OnMiss::kNative || frozen()) {
    return;
  }
  Pending pending;
  pending.hook = &hook;
  pending.words.assign(words.begin(), words.end());
  pending.hash = hash;
  pending.generation = verdict_generation.load(std::memory_order_relaxed);
  pending.again = std::move(again);
  {
    const Lock lock(queue_mutex_);
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
  request.call_json = operator_call_json(hook, pending.words,
                                         {.digest = request.digest,
                                          .measured = number_of(pending.again),
                                          .left_to_do = pending.again});
  std::shared_ptr<MissHandler> handler;
  {
    const Lock lock(registry_mutex_);
    handler = handler_;
  }
  if (!handler) {
    return;
  }
  {
    const Lock lock(queue_mutex_);
    if (stopping_ || !again_.emplace(request.digest, std::move(pending)).second) {
      return;
    }
  }
  try {
    handler->submit(request);
  } catch (const std::exception& error) {
    log_line(LogLevel::kWarning, std::string("a verdict is not looked at again: ") + error.what());
    const Lock lock(queue_mutex_);
    again_.erase(request.digest);
  }
}

// The service is done with a key that was asked for again: what the store has now is the verdict.
void Runtime::complete_again(const std::string& digest) {
  Pending pending;
  {
    const Lock lock(queue_mutex_);
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
    // The same as before where the service could not look at it again.
    if (manifest && left_to_do(manifest.value()) != pending.again) {
      install(*pending.hook, pending.words, pending.hash, manifest.value());
    }
  } catch (const std::exception& error) {
    log_line(LogLevel::kWarning, std::string("a verdict could not be installed: ") + error.what());
  }
}

}  // namespace eagercache
