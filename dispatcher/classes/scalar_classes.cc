#include "dispatcher/classes/scalar_classes.h"

#include <algorithm>

namespace eagercache {

std::vector<Word> scalar_class_of(std::span<const Word> words) {
  std::vector<Word> own(words.size());
  std::array<double, kMaxScalars> values;
  return scalar_class(words, own, values) == 0 ? std::vector<Word>{} : own;
}

Found ScalarClasses::find(std::span<const Word> words, Numbers& numbers) const noexcept {
  std::array<Word, KeyBuffer::kCapacity> own;  // uninitialised: on the path of a call
  numbers.count_ = scalar_class(words, own, numbers.values_);
  if (numbers.count_ == 0) {
    return {};
  }
  const std::span<const Word> key(own.data(), words.size());
  const Found found = table_.find(key, hash_words(key));
  if (found.state == EntryState::kPending) {
    return {};
  }
  return found;
}

ScalarClasses::Step ScalarClasses::next_step(std::span<const Word> words, std::uint64_t calls,
                                             std::uint64_t enough) {
  std::vector<Word> own(words.size());
  std::array<double, kMaxScalars> values;
  const std::size_t count = scalar_class(words, own, values);
  if (count == 0) {
    return Step::kNothing;
  }
  const Lock lock(mutex_);
  const auto known = classes_.find(own);
  if (known == classes_.end() && classes_.size() >= kMaxClasses) {
    return Step::kNothing;
  }
  Class& mine = known != classes_.end() ? known->second : classes_[std::move(own)];
  switch (mine.state) {
    case Class::State::kNew:
      return Step::kAsk;
    case Class::State::kCompiling:
      return Step::kUnderWay;
    case Class::State::kDecided:
      return Step::kNothing;
    case Class::State::kUnknown:
      break;
  }
  mine.calls += calls;
  const std::span<const double> met(values.data(), count);
  if (mine.values.size() < kEnoughValues && std::ranges::none_of(mine.values, [&](const auto& one) {
        return std::ranges::equal(one, met);
      })) {
    mine.values.emplace_back(met.begin(), met.end());
  }
  if (mine.values.size() < kEnoughValues || mine.calls < enough) {
    return Step::kNothing;
  }
  mine.state = Class::State::kCompiling;
  return Step::kCompile;
}

void ScalarClasses::put(std::span<const Word> words, ScalarKernel* kernel) {
  std::vector<Word> own = scalar_class_of(words);
  if (own.empty()) {
    return;
  }
  const Lock lock(mutex_);
  table_.set_kernel(own, hash_words(own), kernel);
  empty_.store(false, std::memory_order_relaxed);
  classes_[std::move(own)] = {Class::State::kDecided, 0, {}};
}

void ScalarClasses::put_native(std::span<const Word> words) {
  std::vector<Word> own = scalar_class_of(words);
  if (own.empty()) {
    return;
  }
  const Lock lock(mutex_);
  table_.set_native(own, hash_words(own));
  empty_.store(false, std::memory_order_relaxed);
  classes_[std::move(own)] = {Class::State::kDecided, 0, {}};
}

void ScalarClasses::note_unknown(std::span<const Word> words) {
  const Lock lock(mutex_);
  if (const auto known = classes_.find(scalar_class_of(words)); known != classes_.end()) {
    known->second.state = Class::State::kUnknown;
  }
}

void ScalarClasses::close(std::span<const Word> words) {
  const Lock lock(mutex_);
  if (const auto known = classes_.find(scalar_class_of(words)); known != classes_.end()) {
    known->second = {Class::State::kDecided, 0, {}};
  }
}

bool ScalarClasses::retire(std::span<const Word> words) {
  const std::vector<Word> own = scalar_class_of(words);
  if (own.empty()) {
    return false;
  }
  const Lock lock(mutex_);
  if (table_.find(own, hash_words(own)).state != EntryState::kKernel) {
    return false;
  }
  table_.set_native(own, hash_words(own));
  return true;
}

void ScalarClasses::clear() {
  const Lock lock(mutex_);
  table_.clear();
  empty_.store(true, std::memory_order_relaxed);
  classes_.clear();
}

}  // namespace eagercache
