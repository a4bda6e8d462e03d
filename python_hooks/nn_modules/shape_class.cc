#include "python_hooks/nn_modules/shape_class.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "python_hooks/nn_modules/record.h"

namespace eagercache {

std::vector<std::uint32_t> dense_order(std::span<const Word> sizes, std::span<const Word> strides) {
  std::vector<std::uint32_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0U);
  // Of equal strides the later dimension is the inner one, as in a contiguous tensor.
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return strides[a] != strides[b] ? strides[a] < strides[b] : a > b;
  });
  Word expected = 1;
  for (const std::uint32_t dimension : order) {
    if (strides[dimension] != expected) {
      return {};
    }
    expected *= sizes[dimension];
  }
  return order;
}

ModuleShapeClass::ModuleShapeClass(std::span<const Word> words,
                                   const std::vector<std::vector<std::int64_t>>& sizes,
                                   ModuleKernel* kernel, Choice choice)
    : words_(words.begin(), words.end()), kernel_(kernel), choice_(std::move(choice)) {
  const std::vector<SizedPlace> places = sized_places(words);
  if (kernel == nullptr || kernel->shape == nullptr || places.empty() ||
      places.size() != sizes.size() || choice_.empty() ||
      !std::is_sorted(choice_.begin(), choice_.end())) {
    throw std::invalid_argument("no class of calls");
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    const SizedPlace& place = places[i];
    if (sizes[i].size() != place.rank) {
      throw std::invalid_argument("a tensor of another rank");
    }
    Sized sized{place, sizes[i], {}, {}};
    const bool is_open = std::ranges::find(sizes[i], kOpen) != sizes[i].end();
    if (!place.is_count && !place.is_same) {
      const auto strides = words.subspan(place.word + 1 + place.rank, place.rank);
      sized.innermost = dense_order(words.subspan(place.word + 1, place.rank), strides);
      if (sized.innermost.size() != place.rank) {
        if (is_open) {
          throw std::invalid_argument("a tensor that is not dense");
        }
        sized.strides.assign(strides.begin(), strides.end());
      }
    }
    if (place.is_same && is_open) {
      throw std::invalid_argument("a tensor that is given again has no sizes of its own");
    }
    num_open_ += static_cast<std::size_t>(std::count(sizes[i].begin(), sizes[i].end(), kOpen));
    sized_.push_back(std::move(sized));
  }
  for (const std::vector<std::int64_t>& row : kernel->output_strides) {
    num_numbers_ += row.size();
  }
  num_numbers_ += kernel->num_plan_sizes;
  for (const ModuleKernel::Input& input : kernel->inputs) {
    if (!input.from_module && input.index >= places.size()) {
      throw std::invalid_argument("the kernel asks for a tensor that no such call has");
    }
  }
  if (num_open_ == 0) {
    throw std::invalid_argument("a class of calls without an open size");
  }
}

bool ModuleShapeClass::is_laid_out(const Sized& sized, std::span<const Word> words,
                                   std::int64_t* elements) const noexcept {
  const Word* const sizes = words.data() + sized.place.word + 1;
  const Word* const strides = sizes + sized.place.rank;
  if (!sized.strides.empty()) {
    return std::equal(sized.strides.begin(), sized.strides.end(), strides);
  }
  Word expected = 1;
  for (const std::uint32_t dimension : sized.innermost) {
    if (strides[dimension] != expected) {
      return false;
    }
    expected *= sizes[dimension];
  }
  *elements = static_cast<std::int64_t>(expected);
  return true;
}

ModuleShapeClass::Answer ModuleShapeClass::admits(std::span<const Word> words,
                                                  Layout& layout) const {
  if (words.size() != words_.size()) {
    return Answer::kForeign;
  }
  c10::SmallVector<std::int64_t, 16> open;
  std::int64_t largest = 0;
  std::size_t at = 0;
  for (const Sized& sized : sized_) {
    const SizedPlace& place = sized.place;
    // The tensor's header too: its dtype, rank and alignment.
    if (!std::equal(words.begin() + static_cast<std::ptrdiff_t>(at),
                    words.begin() + static_cast<std::ptrdiff_t>(place.word + 1),
                    words_.begin() + static_cast<std::ptrdiff_t>(at))) {
      return Answer::kForeign;
    }
    if (place.is_same) {  // laid out as it was before; the next words say as which
      at = place.end();
      continue;
    }
    const std::size_t before = open.size();
    for (std::size_t dimension = 0; dimension < place.rank; ++dimension) {
      const std::int64_t offset = place.is_count ? kCountOffset : 0;
      const std::int64_t given = sized.sizes[dimension];
      const auto size = static_cast<std::int64_t>(words[place.word + 1 + dimension]);
      if (given == kOpen ? size + offset < 2 : size != given) {
        return Answer::kForeign;
      }
      if (given == kOpen) {
        open.push_back(size + offset);
      }
    }
    std::int64_t elements = 0;
    if (!place.is_count && !is_laid_out(sized, words, &elements)) {
      return Answer::kForeign;
    }
    if (open.size() != before) {
      largest = std::max(largest, elements);
    }
    at = place.end();
  }
  if (!std::equal(words.begin() + static_cast<std::ptrdiff_t>(at), words.end(),
                  words_.begin() + static_cast<std::ptrdiff_t>(at))) {
    return Answer::kForeign;
  }
  c10::SmallVector<std::int64_t, 32> numbers(num_numbers_);
  if (kernel_->shape(open.data(), numbers.data()) != 0) {
    return Answer::kForeign;
  }
  if (!is_chosen(largest)) {
    return Answer::kNative;
  }
  layout.strides.clear();
  const std::int64_t* next = numbers.data();
  for (const std::vector<std::int64_t>& row : kernel_->output_strides) {
    layout.strides.emplace_back(next, next + row.size());
    next += row.size();
  }
  layout.numbers.assign(next, static_cast<const std::int64_t*>(numbers.end()));
  return Answer::kKernel;
}

// Between two sizes that were tried both have to have been faster: what was not tried is native's.
bool ModuleShapeClass::is_chosen(std::int64_t elements) const noexcept {
  const auto above =
      std::find_if(choice_.begin(), choice_.end(),
                   [&](const std::pair<std::int64_t, bool>& row) { return row.first >= elements; });
  if (above == choice_.end()) {
    return choice_.back().second;
  }
  if (above->first == elements || above == choice_.begin()) {
    return above->second;
  }
  return above->second && std::prev(above)->second;
}

}  // namespace eagercache
