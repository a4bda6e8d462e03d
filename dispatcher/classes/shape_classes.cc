#include "dispatcher/classes/shape_classes.h"

#include <algorithm>

namespace eagercache {
namespace {

constexpr std::size_t kMaxMembers = 8;
constexpr unsigned kMostAlone = 32;  // no key is met so often

// Class words on the stack. Uninitialised: on the path of a new key.
class ClassWords {
 public:
  explicit ClassWords(std::span<const Word> words) noexcept
      : size_(words.size() <= KeyBuffer::kInline && class_words(words, words_) ? words.size() : 0) {
  }
  std::span<const Word> words() const noexcept { return {words_.data(), size_}; }
  bool empty() const noexcept { return size_ == 0; }

 private:
  std::array<Word, KeyBuffer::kInline> words_;
  std::size_t size_;
};

}  // namespace

Found ShapeClasses::find(std::span<const Word> words) const noexcept {
  const ClassWords key(words);
  if (key.empty()) {
    return {};
  }
  const Found found = table_.find(key.words(), hash_words(key.words()));
  if (found.state != EntryState::kKernel) {
    return {};
  }
  Found answer;
  for (const auto& slot : static_cast<const Class*>(found.kernel)->kernels) {
    const Kernel* const kernel = slot.load(std::memory_order_acquire);
    if (kernel == nullptr) {
      continue;
    }
    switch (kernel->shape->admits(words)) {
      case ShapeKernel::Admission::kKernel:
        return {EntryState::kKernel, kernel->answers};
      case ShapeKernel::Admission::kNative:
        answer.state = EntryState::kNative;
        break;
      case ShapeKernel::Admission::kRefused:
        break;
    }
  }
  return answer;
}

ShapeClasses::Class* ShapeClasses::class_of_locked(std::span<const Word> words, bool make) {
  const ClassWords key(words);
  if (key.empty()) {
    return nullptr;
  }
  std::vector<Word> name(key.words().begin(), key.words().end());
  const auto known = classes_.find(name);
  if (known != classes_.end() || !make) {
    return known == classes_.end() ? nullptr : known->second.get();
  }
  if (classes_.size() >= kMaxClasses) {
    return nullptr;
  }
  return classes_.emplace(std::move(name), std::make_unique<Class>()).first->second.get();
}

std::optional<std::size_t> ShapeClasses::unasked(std::span<const Word> words) {
  const Lock lock(mutex_);
  const Class* known = class_of_locked(words, true);
  if (known == nullptr || known->closed || known->asked_all || known->asked == kMaxKernels) {
    return std::nullopt;
  }
  return known->asked;
}

void ShapeClasses::put(std::span<const Word> words, std::size_t number, const ShapeKernel* kernel,
                       LoadedKernel* answers) {
  const Lock lock(mutex_);
  Class* known = class_of_locked(words, true);
  if (known == nullptr || number >= kMaxKernels) {
    return;
  }
  kernels_.push_back(std::make_unique<const Kernel>(Kernel{kernel, answers}));
  known->kernels[number].store(kernels_.back().get(), std::memory_order_release);
  known->asked = std::max(known->asked, number + 1);
  known->compiling = false;
  known->members.clear();
  const ClassWords key(words);
  table_.set_kernel(key.words(), hash_words(key.words()), known);
}

void ShapeClasses::note_unknown(std::span<const Word> words, std::size_t number) {
  const Lock lock(mutex_);
  if (Class* known = class_of_locked(words, true); known != nullptr && known->asked <= number) {
    known->asked_all = true;
    known->compiling = false;
  }
}

bool ShapeClasses::failed(std::span<const Word> words) {
  const Lock lock(mutex_);
  const Class* known = class_of_locked(words, false);
  return known != nullptr && known->failed;
}

void ShapeClasses::close(std::span<const Word> words, bool failed) {
  const Lock lock(mutex_);
  if (Class* known = class_of_locked(words, true)) {
    known->closed = true;
    known->failed = failed;
    known->compiling = false;
    known->members.clear();
  }
}

std::optional<ShapeClasses::Proposal> ShapeClasses::note_call(std::span<const Word> words,
                                                              std::uint64_t calls,
                                                              std::uint64_t enough) {
  const Lock lock(mutex_);
  Class* known = class_of_locked(words, true);
  if (known == nullptr || known->closed || known->compiling || known->asked >= kMaxKernels) {
    return std::nullopt;
  }
  known->calls += calls;
  // The last ones leave no size open, or every new combination would ask for one more.
  const bool fully = known->asked + 2 >= kMaxKernels;
  if (known->calls >= enough) {
    for (const std::vector<Word>& member : known->members) {
      auto pattern = fully ? generalize_fully(words, member) : generalize(words, member);
      if (pattern) {
        known->compiling = true;
        known->calls = 0;
        return Proposal{known->asked, std::move(*pattern)};
      }
    }
  }
  if (known->members.size() < kMaxMembers &&
      std::none_of(known->members.begin(), known->members.end(),
                   [&](const auto& member) { return std::ranges::equal(member, words); })) {
    known->members.emplace_back(words.begin(), words.end());
  }
  return std::nullopt;
}

bool ShapeClasses::lets_alone(std::span<const Word> words, std::uint64_t calls,
                              std::uint64_t enough) {
  const Lock lock(mutex_);
  Class* known = class_of_locked(words, false);
  if (known == nullptr) {
    return calls >= enough;
  }
  if (known->alone >= kMostAlone || calls >> known->alone < enough) {
    return false;
  }
  ++known->alone;
  return true;
}

std::optional<std::size_t> ShapeClasses::under_way(std::span<const Word> words) {
  const Lock lock(mutex_);
  const Class* known = class_of_locked(words, false);
  return known != nullptr && known->compiling ? std::optional(known->asked) : std::nullopt;
}

std::optional<std::size_t> ShapeClasses::retire(std::span<const Word> words) {
  const Lock lock(mutex_);
  Class* known = class_of_locked(words, false);
  if (known == nullptr) {
    return std::nullopt;
  }
  for (std::size_t number = 0; number < kMaxKernels; ++number) {
    const Kernel* kernel = known->kernels[number].load(std::memory_order_relaxed);
    if (kernel != nullptr && kernel->shape->admits(words) == ShapeKernel::Admission::kKernel) {
      known->kernels[number].store(nullptr, std::memory_order_release);
      known->closed = true;
      return number;
    }
  }
  return std::nullopt;
}

void ShapeClasses::clear() {
  const Lock lock(mutex_);
  table_.clear();
  for (auto& [words, known] : classes_) {
    // Threads in find() may hold the class: it is emptied, not freed.
    for (auto& slot : known->kernels) {
      slot.store(nullptr, std::memory_order_release);
    }
    known->asked = 0;
    known->asked_all = known->closed = known->failed = known->compiling = false;
    known->calls = 0;
    known->alone = 0;
    known->members.clear();
  }
}

}  // namespace eagercache
