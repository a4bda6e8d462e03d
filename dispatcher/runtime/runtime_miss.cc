// Runtime: a missed call, on the caller's thread. It asks the store where it may, and else appends
// to the loader's queue (runtime_queue.cc).

#include <bit>
#include <exception>
#include <utility>

#include "dispatcher/base/log.h"
#include "dispatcher/runtime/counted.h"
#include "dispatcher/runtime/runtime.h"

namespace eagercache {

Found Runtime::load_now(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash) {
  Found found{EntryState::kPending, nullptr};
  const Counted asking(asking_);
  if (frozen() || exiting_.load()) {
    return found;
  }
  try {
    const std::string digest = hook.entry_digest(words, policy_tag()).hex();
    if (install_from_store(hook, words, hash, digest, &found)) {
      return found;
    }
    if (has_scalar_classes(hook) && ask_for_scalars(hook, words)) {
      return found;  // from the next call on
    }
    ask_for_class(hook, words);
    if (Found of_class = find_in_class(hook, words, hash); of_class.state == EntryState::kKernel) {
      return of_class;
    }
    if (policy().on_miss == OnMiss::kNative && !frozen()) {
      install_native(hook, words, hash, "native", "not in the store, and on_miss is native", {});
      // This call is still the key's miss; the next one finds the decision.
    }
  } catch (const std::exception& error) {
    log_line(LogLevel::kWarning, std::string("asking the store failed: ") + error.what());
  }
  return found;
}

void Runtime::note_kernel_failure(OperatorHook& hook, std::span<const Word> words) {
  const Counted asking(asking_);
  if (exiting_.load()) {
    return;
  }
  try {
    install_native(hook, words, hash_words(words), "failed", "the kernel reported an error", {});
    hook.scalars().retire(words);
    warn_once(
        "kernel:" + hook.full_name(),
        hook.full_name() + ": a kernel reported an error; native answers its calls from now on");
  } catch (const std::exception&) {
    // Out of memory: the next call meets the kernel again and native answers again.
  }
}

void Runtime::note_wrong_answer(OperatorHook& hook, std::span<const Word> words,
                                const std::string& difference) {
  const Counted asking(asking_);
  if (exiting_.load()) {
    return;
  }
  try {
    const std::string reason = "a kernel's answer differed from native's (" + difference + ")";
    retire_classes(hook, words, reason);
    install_native(hook, words, hash_words(words), "failed", reason, {});
    put_aside(hook.entry_digest(words, policy_tag()).hex(), reason);
    warn_once("wrong:" + hook.full_name(),
              hook.full_name() + ": " + reason + "; it was put aside, and native answers");
  } catch (const std::exception&) {
    // Out of memory: the next verified call meets the kernel again.
  }
}

MissQueue::Ask Runtime::ask_for(const OperatorHook& hook, const MissNote& note) const noexcept {
  const Policy now = policy();
  if (now.on_miss == OnMiss::kNative || frozen()) {
    return Ask::kNothing;
  }
  const std::uint64_t threshold = calls_before_compile(hook);
  // Asked again at every doubling: a request may have been dropped, or its worker lost.
  const bool doubled = note.calls > threshold && std::has_single_bit(note.calls);
  if (!note.inserted && note.calls != threshold && !doubled) {
    return Ask::kNothing;
  }
  return note.calls >= threshold ? Ask::kCompile : Ask::kStore;
}

void Runtime::note_missed_call(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                               const MissNote& note, std::uint64_t native_ns,
                               std::vector<IntegerSample> integers) {
  if (note.inserted) {
    log_event(LogLevel::kDebug, "miss", {{"op", hook.full_name()}});
  }
  const Ask ask = ask_for(hook, note);
  if (ask == Ask::kNothing) {
    return;
  }
  try {
    Pending pending;
    pending.hook = &hook;
    pending.words.assign(words.begin(), words.end());
    pending.hash = hash;
    pending.calls = note.calls;
    pending.native_ns = native_ns;
    pending.generation = verdict_generation.load(std::memory_order_relaxed);
    pending.may_compile = ask == Ask::kCompile;
    pending.integers = std::move(integers);
    std::shared_ptr<Ticket> ticket;
    if (policy().on_miss == OnMiss::kWait && note.inserted && !waited_in_vain_.load()) {
      ticket = std::make_shared<Ticket>();
      pending.tickets.push_back(ticket);
    }
    std::shared_ptr<MissHandler> handler;
    {
      const Lock lock(registry_mutex_);
      handler = handler_;
    }
    if (queue(std::move(pending)) && ticket && handler) {
      wait_for_verdict(*handler, ticket);
    }
  } catch (const std::exception& error) {
    log_line(LogLevel::kWarning, std::string("a missed call could not be queued: ") + error.what());
  }
}

}  // namespace eagercache
