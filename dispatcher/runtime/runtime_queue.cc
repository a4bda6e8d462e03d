// Runtime: the queue of missed calls. One loader thread asks the store, hands what is not there to
// the compile service, and installs verdicts.

#include <sched.h>

#include <chrono>
#include <exception>
#include <utility>

#include "dispatcher/base/log.h"
#include "dispatcher/runtime/call_text.h"
#include "dispatcher/runtime/denied_call.h"
#include "dispatcher/runtime/runtime.h"

namespace eagercache {
namespace {

// Keys beyond this are not queued; they stay pending and are offered again by later calls.
constexpr std::size_t kMaxQueue = 65'536;

// Has this thread never take the processor from the caller who wakes it: a batch thread starts
// where one is free, or when the caller's turn is over.
void give_way_to_callers() noexcept {
  if (sched_getscheduler(0) != SCHED_IDLE) {
    const sched_param ordinary{};
    sched_setscheduler(0, SCHED_BATCH, &ordinary);
  }
}

}  // namespace

// Hands it to the loader's thread, which begins with the first; false where there is no room, or
// where the process ends.
bool Runtime::queue(Pending pending) {
  {
    const Lock lock(queue_mutex_);
    if (stopping_ || queue_.size() >= kMaxQueue) {
      return false;
    }
    if (!loader_.joinable()) {
      loader_ = std::thread([this] { loader_loop(); });
    }
    queue_.push_back(std::move(pending));
  }
  queue_changed_.notify_all();
  return true;
}

// Whether that kernel is under way; then its verdict serves whoever waits for `pending`.
bool Runtime::join_in_flight(const std::string& digest, Pending& pending) {
  const Lock lock(queue_mutex_);
  const auto same = in_flight_.find(digest);
  if (same == in_flight_.end()) {
    return false;
  }
  for (auto& ticket : pending.tickets) {
    same->second.tickets.push_back(std::move(ticket));
  }
  pending.tickets.clear();
  // The digest holds what the policy asks of the compile service; its answer serves this call.
  same->second.generation = pending.generation;
  return true;
}

void Runtime::loader_loop() {
  give_way_to_callers();
  for (;;) {
    Pending pending;
    {
      Lock lock(queue_mutex_);
      lock.wait(queue_changed_, [this]() EAGERCACHE_REQUIRES(queue_mutex_) {
        return stopping_ || !queue_.empty();
      });
      if (stopping_) {
        for (Pending& left : queue_) {
          finish(left);
        }
        queue_.clear();
        return;
      }
      pending = std::move(queue_.front());
      queue_.pop_front();
      ++processing_;
    }
    process(std::move(pending));
    {
      const Lock lock(queue_mutex_);
      --processing_;
    }
    queue_changed_.notify_all();
  }
}

void Runtime::process(Pending pending) {
  try {
    if (pending.generation != verdict_generation.load(std::memory_order_relaxed) || frozen()) {
      finish(pending);
      return;
    }
    if (pending.lost) {
      keep_lost_trial(pending);
      return;
    }
    if (!pending.again.empty()) {
      submit_again(std::move(pending));
      return;
    }
    const std::string digest = pending.hook->entry_digest(pending.words, policy_tag()).hex();
    if (join_in_flight(digest, pending)) {
      return;
    }
    Found found = pending.hook->table().find(pending.words, pending.hash);
    const bool decided = found.state == EntryState::kKernel || found.state == EntryState::kNative;
    if (!decided) {
      if (std::string denial = denied_call(*pending.hook, pending.words); !denial.empty()) {
        install_native(*pending.hook, pending.words, pending.hash, "native", denial, {});
        finish(pending);
        return;
      }
    }
    if (decided ||  // by an answer that came while this call waited in the queue
        install_from_store(*pending.hook, pending.words, pending.hash, digest, &found) ||
        hand_to_scalars(pending) || hand_to_class(pending) || !pending.may_compile ||
        pending.calls < enough_calls(*pending.hook, pending.native_ns)) {
      finish(pending);
      return;
    }
    submit(std::move(pending), {.digest = digest});
  } catch (const std::exception& error) {
    log_line(LogLevel::kWarning,
             std::string("a missed call could not be handled: ") + error.what());
    finish(pending);
  }
}

void Runtime::submit(Pending pending, CallRequest call) {
  const std::string digest = call.digest;
  if (join_in_flight(digest, pending)) {
    return;  // a class's, from before a change of policy that forgot that it was under way
  }
  std::shared_ptr<MissHandler> handler;
  {
    const Lock lock(registry_mutex_);
    handler = handler_;
  }
  if (!handler || !store()) {
    // Of a class too: there will be no kernel at all.
    install_native(*pending.hook, pending.words, pending.hash, "native",
                   "there is no compile service", {});
    finish(pending);
    return;
  }
  requests_.fetch_add(1, std::memory_order_relaxed);
  call.calls = pending.calls;
  call.native_ns = pending.native_ns;
  call.integers = pending.integers;
  const CompileRequest request{digest, operator_call_json(*pending.hook, pending.words, call)};
  const std::string full_name = pending.hook->full_name();
  bool stopping = false;
  {
    const Lock lock(queue_mutex_);
    stopping = stopping_;
    if (!stopping) {
      in_flight_.emplace(digest, std::move(pending));
    }
  }
  if (stopping) {
    finish(pending);  // nobody would complete it
    return;
  }
  log_event(LogLevel::kInfo, "submit", {{"op", full_name}, {"digest", digest}});
  try {
    handler->submit(request);
  } catch (const std::exception& error) {
    complete(digest, "failed", error.what());
  }
}

void Runtime::complete(const std::string& digest, const std::string& decision,
                       const std::string& reason, double cpu_seconds) {
  Pending pending;
  {
    const Lock lock(queue_mutex_);
    if (const auto found = in_flight_.find(digest); found != in_flight_.end()) {
      pending = std::move(found->second);
      // Kept in flight, without its contents, until the verdict stands: waiters on idleness must
      // find it installed.
    }
  }
  if (pending.hook == nullptr) {
    complete_again(digest);
    return;
  }
  waited_in_vain_.store(false);
  pending.hook->note_compile_cost(cpu_seconds);
  try {
    if (pending.of_class) {
      complete_class(pending, digest, decision, reason);
    } else if (pending.generation == verdict_generation.load(std::memory_order_relaxed) &&
               !frozen()) {
      Found found;
      if (!install_from_store(*pending.hook, pending.words, pending.hash, digest, &found) &&
          !frozen()) {
        install_native(*pending.hook, pending.words, pending.hash,
                       decision == "failed" ? "failed" : "native", reason, {});
      }
    }
  } catch (const std::exception& error) {
    log_line(LogLevel::kWarning, std::string("a verdict could not be installed: ") + error.what());
  }
  {
    const Lock lock(queue_mutex_);
    if (const auto found = in_flight_.find(digest); found != in_flight_.end()) {
      for (auto& ticket : found->second.tickets) {
        pending.tickets.push_back(std::move(ticket));
      }
      in_flight_.erase(found);
    }
  }
  finish(pending);
  queue_changed_.notify_all();
}

void Runtime::finish(Pending& pending) {
  for (const std::shared_ptr<Ticket>& ticket : pending.tickets) {
    {
      const Lock lock(ticket->mutex);
      ticket->done = true;
    }
    ticket->done_changed.notify_all();
  }
  pending.tickets.clear();
}

std::size_t Runtime::outstanding() const {
  const Lock lock(queue_mutex_);
  return queue_.size() + processing_ + in_flight_.size();
}

bool Runtime::wait_until_idle(double seconds) {
  Lock lock(queue_mutex_);
  const auto idle = [this]() EAGERCACHE_REQUIRES(queue_mutex_) {
    return queue_.empty() && processing_ == 0 && in_flight_.empty();
  };
  if (seconds < 0) {
    lock.wait(queue_changed_, idle);
    return true;
  }
  return lock.wait_for(queue_changed_, std::chrono::duration<double>(seconds), idle);
}

void Runtime::shut_down() {
  hooks_answer.store(false, std::memory_order_relaxed);
  set_handler(nullptr);
  std::thread loader;
  std::vector<Pending> left;
  {
    const Lock lock(queue_mutex_);
    stopping_ = true;
    loader = std::move(loader_);
    for (auto& [digest, pending] : in_flight_) {
      left.push_back(std::move(pending));
    }
    in_flight_.clear();
  }
  queue_changed_.notify_all();
  for (Pending& pending : left) {
    finish(pending);
  }
  if (loader.joinable()) {
    loader.join();
  }
}

}  // namespace eagercache
