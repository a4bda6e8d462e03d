// Runtime: from a missed call to an installed verdict. One loader thread asks the store, hands what
// is not there to the compile service, and installs verdicts; callers only append to its queue.

#include <sched.h>

#include <bit>
#include <chrono>
#include <exception>
#include <utility>

#include "dispatcher/base/log.h"
#include "dispatcher/kernels/numerics_rule.h"
#include "dispatcher/operators/denied_operators.h"
#include "dispatcher/runtime/call_text.h"
#include "dispatcher/runtime/runtime.h"

namespace eagercache {
namespace {

// Keys beyond this are not queued; they stay pending and are offered again by later calls.
constexpr std::size_t kMaxQueue = 65'536;
// Verdicts remembered for people, per operator and in all.
constexpr std::size_t kMaxVerdicts = 4'096;
constexpr std::size_t kMaxAllVerdicts = 16'384;

void add_dtypes(const std::vector<DecodedArgument>& arguments, std::vector<std::string>& dtypes) {
  for (const DecodedArgument& argument : arguments) {
    if (argument.kind == ArgumentKind::kTensor) {
      dtypes.push_back(scalar_type_name(argument.tensor.dtype));
    }
    add_dtypes(argument.elements, dtypes);
  }
}

// Why the table of denied operators has no kernel answer the call; empty when it does not name it.
std::string denied_call(const OperatorHook& hook, std::span<const Word> words) {
  if (!is_ever_denied(hook.full_name())) {
    return {};
  }
  DecodedCall call;
  std::vector<std::string> dtypes;
  if (decode_call(words, &call)) {
    add_dtypes(call.arguments, dtypes);
  }
  return denial(hook.full_name(), c10::toString(hook.dispatch_key()), dtypes);
}

// Has this thread never take the processor from the caller who wakes it: a batch thread starts
// where one is free, or when the caller's turn is over.
void give_way_to_callers() noexcept {
  if (sched_getscheduler(0) != SCHED_IDLE) {
    const sched_param ordinary{};
    sched_setscheduler(0, SCHED_BATCH, &ordinary);
  }
}

class Counted {
 public:
  explicit Counted(std::atomic<int>& count) : count_(count) { count_.fetch_add(1); }
  ~Counted() { count_.fetch_sub(1); }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  std::atomic<int>& count_;
};

}  // namespace

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
    std::lock_guard lock(registry_mutex_);
    handler = handler_;
  }
  if (handler) {
    handler->note_put_aside(digest, reason);
  }
}

// Whether that kernel is under way; then its verdict serves whoever waits for `pending`.
bool Runtime::join_in_flight(const std::string& digest, Pending& pending) {
  std::lock_guard lock(queue_mutex_);
  const auto same = in_flight_.find(digest);
  if (same == in_flight_.end()) {
    return false;
  }
  for (auto& ticket : pending.tickets) {
    same->second.tickets.push_back(std::move(ticket));
  }
  pending.tickets.clear();
  return true;
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
  std::lock_guard lock(registry_mutex_);
  LoadedKernel*& guarded = replica_kernels_[kernel];
  if (guarded == nullptr) {
    guarded = make_replica_kernel(kernel);
  }
  return guarded;
}

Found Runtime::install(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash,
                       const Manifest& manifest) {
  if (manifest.kind != EntryKind::kKernel) {
    install_native(hook, words, hash, manifest.kind == EntryKind::kNative ? "native" : "failed",
                   manifest.fact("reason"), manifest.facts);
    measure_again(hook, words, hash, manifest);
    return {EntryState::kNative, nullptr};
  }
  if (std::string reason = rejected_by_policy(hook, words, manifest); !reason.empty()) {
    install_native(hook, words, hash, "native", reason, manifest.facts);
    return {EntryState::kNative, nullptr};
  }
  Result<LoadedKernel*> kernel = load_kernel(hook, words, manifest);
  if (!kernel) {
    if (kernel.code() == StatusCode::kCorrupt) {
      // Quarantined: the key is a miss again and may be compiled anew.
      log_line(LogLevel::kWarning, hook.full_name() + ": a damaged kernel was put aside (" +
                                       kernel.status().message() + ")");
      return {EntryState::kPending, nullptr};
    }
    if (kernel.code() == StatusCode::kFull) {
      warn_once("full", kernel.status().message() + "; further keys stay native");
      install_native(hook, words, hash, "native", kernel.status().message(), manifest.facts);
      return {EntryState::kNative, nullptr};
    }
    log_line(LogLevel::kWarning, hook.full_name() + ": a stored kernel cannot be used (" +
                                     kernel.status().to_string() + "); native answers");
    install_native(hook, words, hash, "failed", kernel.status().to_string(), manifest.facts);
    return {EntryState::kNative, nullptr};
  }
  LoadedKernel* const answers = for_replicas(kernel.value(), manifest);
  if (!put_kernel(hook, words, hash, answers)) {
    return {EntryState::kPending, nullptr};
  }
  record(hook, words, {manifest.key.hex(), {}, "kernel", {}, manifest.facts});
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
  std::lock_guard lock(verdicts_mutex_);
  auto& known = verdicts_[&hook];
  const bool has_room = known.size() < kMaxVerdicts && verdict_count_ < kMaxAllVerdicts;
  if (has_room || known.contains(verdict.digest)) {
    std::string digest = verdict.digest;
    verdict_count_ += known.insert_or_assign(std::move(digest), std::move(verdict)).second;
  }
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
    retire_class_kernel(hook, words, reason);
    retire_scalars(hook, words, reason);
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
  const std::uint64_t threshold =
      now.on_miss == OnMiss::kWait ? 1 : now.compile_after * hook.compile_cost();
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
      std::lock_guard lock(registry_mutex_);
      handler = handler_;
    }
    {
      std::lock_guard lock(queue_mutex_);
      if (stopping_ || queue_.size() >= kMaxQueue) {
        return;
      }
      if (!loader_.joinable()) {
        loader_ = std::thread([this] { loader_loop(); });
      }
      queue_.push_back(std::move(pending));
    }
    queue_changed_.notify_all();
    if (ticket && handler) {
      wait_for_verdict(*handler, ticket);
    }
  } catch (const std::exception& error) {
    log_line(LogLevel::kWarning, std::string("a missed call could not be queued: ") + error.what());
  }
}

void Runtime::loader_loop() {
  give_way_to_callers();
  for (;;) {
    Pending pending;
    {
      std::unique_lock lock(queue_mutex_);
      queue_changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
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
      std::lock_guard lock(queue_mutex_);
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
    if (pending.measured > 0) {
      submit_again(std::move(pending));
      return;
    }
    const std::string digest = pending.hook->entry_digest(pending.words, policy_tag()).hex();
    {
      std::lock_guard lock(queue_mutex_);
      if (const auto same = in_flight_.find(digest); same != in_flight_.end()) {
        for (auto& ticket : pending.tickets) {
          same->second.tickets.push_back(std::move(ticket));
        }
        // The digest holds what the policy asks of the compile service; its answer serves this
        // call.
        same->second.generation = pending.generation;
        return;
      }
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
        hand_to_scalars(pending) || hand_to_class(pending) || !pending.may_compile) {
      finish(pending);
      return;
    }
    const CompileRequest request{
        digest, operator_call_json(*pending.hook, pending.words, digest, pending.calls,
                                   pending.native_ns, pending.integers)};
    submit(std::move(pending), request);
  } catch (const std::exception& error) {
    log_line(LogLevel::kWarning,
             std::string("a missed call could not be handled: ") + error.what());
    finish(pending);
  }
}

void Runtime::submit(Pending pending, const CompileRequest& request) {
  const std::string& digest = request.digest;
  std::shared_ptr<MissHandler> handler;
  {
    std::lock_guard lock(registry_mutex_);
    handler = handler_;
  }
  if (!handler || !store()) {
    // Of a class too: there will be no kernel at all.
    install_native(*pending.hook, pending.words, pending.hash, "native",
                   "there is no compile service", {});
    finish(pending);
    return;
  }
  const std::string full_name = pending.hook->full_name();
  bool stopping = false;
  {
    std::lock_guard lock(queue_mutex_);
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
    std::lock_guard lock(queue_mutex_);
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
    if (pending.class_number) {
      complete_class(pending, digest, decision, reason);
    } else if (pending.scalars) {
      complete_scalars(pending, digest, decision, reason);
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
    std::lock_guard lock(queue_mutex_);
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
      std::lock_guard lock(ticket->mutex);
      ticket->done = true;
    }
    ticket->done_changed.notify_all();
  }
  pending.tickets.clear();
}

std::size_t Runtime::outstanding() const {
  std::lock_guard lock(queue_mutex_);
  return queue_.size() + processing_ + in_flight_.size();
}

bool Runtime::wait_until_idle(double seconds) {
  std::unique_lock lock(queue_mutex_);
  const auto idle = [this] { return queue_.empty() && processing_ == 0 && in_flight_.empty(); };
  if (seconds < 0) {
    queue_changed_.wait(lock, idle);
    return true;
  }
  return queue_changed_.wait_for(lock, std::chrono::duration<double>(seconds), idle);
}

void Runtime::shut_down() {
  hooks_answer.store(false, std::memory_order_relaxed);
  set_handler(nullptr);
  std::thread loader;
  std::vector<Pending> left;
  {
    std::lock_guard lock(queue_mutex_);
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
