#include "python_hooks/module_record.h"

#include <algorithm>
#include <iterator>

namespace eagercache {
namespace {

// Identities remembered for one module: train and eval mode, and a few more.
constexpr std::size_t kMaxIdentities = 16;

}  // namespace

ModuleVariant* ModuleRecord::find(std::span<const Word> words) noexcept {
  if (current_ == nullptr) {
    return nullptr;
  }
  const auto found =
      std::find_if(current_->begin(), current_->end(), [&](const ModuleVariant& variant) {
        return std::equal(words.begin(), words.end(), variant.words.begin(), variant.words.end());
      });
  if (found == current_->end()) {
    return nullptr;
  }
  // The latest first: a program that calls with one form pays for one comparison.
  current_->splice(current_->begin(), *current_, found);
  return &current_->front();
}

ModuleVariant* ModuleRecord::add(std::span<const Word> words) {
  if (current_ == nullptr || current_->size() >= kMaxVariants) {
    return nullptr;
  }
  current_->push_front({{words.begin(), words.end()}, ModuleVariant::State::kPending, 0, nullptr});
  return &current_->front();
}

void ModuleRecord::use_identity(const std::string& identity) {
  const auto known = by_identity_.find(identity);
  if (known == by_identity_.end() && by_identity_.size() >= kMaxIdentities) {
    by_identity_.clear();
  }
  current_ = &by_identity_[identity];
}

void ModuleRecord::install(const std::string& identity, std::span<const Word> words,
                           ModuleKernel* kernel) {
  const auto known = by_identity_.find(identity);
  if (known == by_identity_.end()) {
    return;
  }
  for (ModuleVariant& variant : known->second) {
    if (std::equal(words.begin(), words.end(), variant.words.begin(), variant.words.end())) {
      variant.state =
          kernel == nullptr ? ModuleVariant::State::kNative : ModuleVariant::State::kKernel;
      variant.kernel = kernel;
      return;
    }
  }
}

}  // namespace eagercache
