#include "dispatcher/memory/large_blocks.h"

#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <utility>

namespace eagercache {
namespace {

// Four sizes to each doubling. A block carries no header: what frees it knows its size.
constexpr std::size_t kSteps = 4;
constexpr auto kLeastPower = static_cast<std::size_t>(std::countr_zero(kLeastLargeBlock));
constexpr std::size_t kSizes =
    (static_cast<std::size_t>(std::countr_zero(kMostLargeBlock)) - kLeastPower) * kSteps;
constexpr std::size_t kMostBlocks = 16;

// The number of the least size that holds so many bytes.
constexpr std::size_t size_number(std::size_t bytes) {
  const auto power = static_cast<std::size_t>(std::bit_width(bytes - 1)) - 1;
  const std::size_t step = ((bytes - 1) >> (power - 2)) - kSteps;
  return (power - kLeastPower) * kSteps + step;
}

constexpr std::size_t block_bytes(std::size_t number) {
  return (kSteps + 1 + number % kSteps) << (kLeastPower - 2 + number / kSteps);
}

static_assert(size_number(kLeastLargeBlock + 1) == 0 && size_number(kMostLargeBlock) == kSizes - 1);
static_assert(block_bytes(kSizes - 1) == kMostLargeBlock && block_bytes(0) == 10U << 10);

std::atomic<std::size_t> kept_by_all{0};

// What a thread keeps, in the order of its coming. Plain data; `ShelfOwner` frees it.
struct Shelf {
  struct Place {
    void* memory;
    std::size_t number;
  };
  std::array<Place, kMostBlocks> places;
  std::size_t count;
  std::size_t bytes;
  enum class State : std::uint8_t { kNew, kOpen, kEnded } state;
  bool closed;  // by WithoutKeptBlocks

  // The block at `index`, which is the caller's from then on.
  void* remove(std::size_t index) noexcept {
    const Place place = places[index];
    std::copy(places.data() + index + 1, places.data() + count, places.data() + index);
    --count;
    bytes -= block_bytes(place.number);
    kept_by_all.fetch_sub(block_bytes(place.number), std::memory_order_relaxed);
    return place.memory;
  }

  void clear() noexcept {
    while (count != 0) {
      c10::free_cpu(remove(0));
    }
  }

  // Null when there is none. What was dropped last is in the processor's caches.
  void* find(std::size_t number) noexcept {
    for (std::size_t i = count; i-- != 0;) {
      if (places[i].number == number) {
        return remove(i);
      }
    }
    return nullptr;
  }

  // False when it is not kept.
  bool put(void* memory, std::size_t number) noexcept {
    const std::size_t more = block_bytes(number);
    if (state != State::kOpen || closed) {
      return false;
    }
    while (count == kMostBlocks || bytes + more > kMostKeptByThread) {
      c10::free_cpu(remove(0));
    }
    if (kept_by_all.fetch_add(more, std::memory_order_relaxed) + more > kMostKeptByProcess) {
      kept_by_all.fetch_sub(more, std::memory_order_relaxed);
      return false;
    }
    places[count++] = {memory, number};
    bytes += more;
    return true;
  }
};
constinit thread_local Shelf shelf{};

// Blocks that are dropped later in this thread are freed at once.
struct ShelfOwner {
  ~ShelfOwner() {
    shelf.state = Shelf::State::kEnded;
    shelf.clear();
  }
};

void open_shelf() {
  thread_local const ShelfOwner owner;
  static_cast<void>(&owner);
  shelf.state = Shelf::State::kOpen;
}

template <std::size_t kNumber>
void drop_block(void* memory) {
  if (!shelf.put(memory, kNumber)) {
    c10::free_cpu(memory);
  }
}

template <std::size_t... kNumbers>
constexpr std::array<c10::DeleterFnPtr, kSizes> make_drops(
    std::index_sequence<kNumbers...> /*numbers*/) {
  return {&drop_block<kNumbers>...};
}
constexpr std::array<c10::DeleterFnPtr, kSizes> kDrops =
    make_drops(std::make_index_sequence<kSizes>());

// Null without memory.
void* new_block(std::size_t number) noexcept {
  try {
    return c10::alloc_cpu(block_bytes(number));
  } catch (...) {
    shelf.clear();
    return nullptr;
  }
}

}  // namespace

c10::DataPtr allocate_block(std::size_t bytes) {
  c10::Allocator* const allocator = c10::GetCPUAllocator();
  if (bytes > kLeastLargeBlock && bytes <= kMostLargeBlock && !allocation_is_watched(allocator)) {
    if (shelf.state == Shelf::State::kNew) {
      open_shelf();
    }
    const std::size_t number = size_number(bytes);
    void* memory = shelf.find(number);
    if (memory == nullptr) {
      memory = new_block(number);
    }
    if (memory != nullptr) {
      return {memory, memory, kDrops[number], c10::Device(c10::DeviceType::CPU)};
    }
  }
  return allocator->allocate(bytes);
}

WithoutKeptBlocks::WithoutKeptBlocks() noexcept : outermost_(!std::exchange(shelf.closed, true)) {
  shelf.clear();
}

WithoutKeptBlocks::~WithoutKeptBlocks() {
  if (outermost_) {
    shelf.closed = false;
  }
}

std::size_t kept_by_thread() noexcept { return shelf.bytes; }

std::size_t kept_by_process() noexcept { return kept_by_all.load(std::memory_order_relaxed); }

}  // namespace eagercache
