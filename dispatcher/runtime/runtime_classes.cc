// Runtime: the way of a kernel that answers a class of calls. It is asked for, compiled and
// installed like the kernel of one key, under a key of its own in the store. What a class is, when
// one is worth a kernel and what becomes of its calls is in runtime_shapes.cc (sizes may change)
// and runtime_scalars.cc (numbers may change).

#include <utility>

#include "dispatcher/runtime/runtime.h"

namespace eagercache {

// Empty where the call has no such class.
std::string Runtime::class_digest(const OperatorHook& hook, std::span<const Word> words,
                                  const ClassKernel& of) const {
  if (of.kind == ClassKernel::Kind::kScalars) {
    const std::vector<Word> own = scalar_class_of(words);
    return own.empty() ? std::string() : hook.entry_digest(own, policy_tag() + "/scalars").hex();
  }
  std::vector<Word> own(words.size());
  if (!class_words(words, own)) {
    return {};
  }
  return hook.entry_digest(own, policy_tag() + "/class/" + std::to_string(of.number)).hex();
}

// Whether the store had a verdict that answers the class's calls.
bool Runtime::ask_for_kernel_of(OperatorHook& hook, std::span<const Word> words,
                                const ClassKernel& of) {
  const std::string digest = class_digest(hook, words, of);
  if (const Result<Manifest> manifest = find_entry(digest); manifest) {
    return install_class(hook, words, of, manifest.value(), digest);
  }
  note_class_unknown(hook, words, of);
  return false;
}

void Runtime::note_class_unknown(OperatorHook& hook, std::span<const Word> words,
                                 const ClassKernel& of) {
  if (of.kind == ClassKernel::Kind::kScalars) {
    hook.scalars().note_unknown(words);
  } else {
    hook.classes().note_unknown(words, of.number);
  }
}

void Runtime::close_class(OperatorHook& hook, std::span<const Word> words, const ClassKernel& of,
                          bool failed) {
  if (of.kind == ClassKernel::Kind::kScalars) {
    hook.scalars().close(words);
  } else {
    hook.classes().close(words, failed);
  }
}

bool Runtime::install_class(OperatorHook& hook, std::span<const Word> words, const ClassKernel& of,
                            const Manifest& manifest, const std::string& digest) {
  const bool scalars = of.kind == ClassKernel::Kind::kScalars;
  if (scalars && manifest.kind == EntryKind::kNative && manifest.fact("of_all_numbers") == "1") {
    hook.scalars().put_native(words);  // kernels for single numbers would fare no better
    record(hook, words, {digest, {}, "native", manifest.fact("reason"), manifest.facts});
    return true;
  }
  EntryKernel entry = kernel_of(hook, words, manifest);
  if (entry.kernel != nullptr) {
    const bool put = put_unless_frozen([&] {
      auto [decision, reason] = scalars
                                    ? put_scalars(hook, words, entry.kernel, manifest)
                                    : put_shapes(hook, words, of.number, entry.kernel, manifest);
      entry.decision = std::move(decision);
      entry.reason = std::move(reason);
    });
    if (!put) {
      return false;
    }
  }
  if (entry.decision != "kernel") {
    close_class(hook, words, of, entry.decision == "failed");
  }
  record(hook, words, {digest, {}, entry.decision, entry.reason, manifest.facts});
  return entry.decision == "kernel";
}

// Has the kernel compiled, on behalf of whoever waits for the key. The tickets of `pending` are
// gone from it.
void Runtime::hand_over(Pending& pending, const ClassKernel& of, CallRequest request) {
  request.digest = class_digest(*pending.hook, pending.words, of);
  pending.of_class = of;
  Pending handed = std::move(pending);
  pending.tickets.clear();
  submit(std::move(handed), std::move(request));
}

void Runtime::complete_class(Pending& pending, const std::string& digest,
                             const std::string& decision, const std::string& reason) {
  OperatorHook& hook = *pending.hook;
  const ClassKernel of = *pending.of_class;
  if (pending.generation != verdict_generation.load(std::memory_order_relaxed) || frozen()) {
    note_class_unknown(hook, pending.words, of);
    return;
  }
  const Result<Manifest> manifest = find_entry(digest);
  if (!manifest) {
    close_class(hook, pending.words, of, decision == "failed");
    record(hook, pending.words,
           {digest, {}, decision == "failed" ? "failed" : "native", reason, {}});
  } else if (install_class(hook, pending.words, of, manifest.value(), digest)) {
    if (of.kind == ClassKernel::Kind::kShapes) {
      answer_waiting_keys(hook);
    }
    return;
  } else if (frozen()) {  // since the look above
    note_class_unknown(hook, pending.words, of);
    return;
  }
  queue_alone(pending);
}

// No kernel for its class: the key is on its own.
void Runtime::queue_alone(Pending& pending) {
  Pending alone = std::move(pending);
  pending.tickets.clear();
  alone.of_class.reset();
  {
    const Lock lock(queue_mutex_);
    if (!stopping_) {
      queue_.push_back(std::move(alone));
      return;
    }
  }
  finish(alone);
}

// A kernel's answer to this call was wrong: whichever class it is of has no kernel any more.
void Runtime::retire_classes(OperatorHook& hook, std::span<const Word> words,
                             const std::string& reason) {
  if (const auto number = retire_shapes(hook, words)) {
    put_aside(class_digest(hook, words, {ClassKernel::Kind::kShapes, *number}), reason);
  }
  if (hook.scalars().retire(words)) {
    put_aside(class_digest(hook, words, {ClassKernel::Kind::kScalars}), reason);
  }
}

}  // namespace eagercache
