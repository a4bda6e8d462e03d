#include "dispatcher/memory/output_allocation.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <array>
#include <bit>
#include <cstdlib>
#include <new>
#include <utility>

#include "dispatcher/memory/large_blocks.h"

namespace eagercache {
namespace {

constexpr std::size_t kBlockAlignment = 64;  // as PyTorch's default CPU allocator's
constexpr std::size_t kClasses = 8;          // 64, 128 ... 8192 bytes
constexpr std::size_t kNoClass = kClasses;
constexpr std::uint32_t kMostKept = 32;  // blocks of a class and thread
static_assert(kBlockAlignment << (kClasses - 1) == kLeastLargeBlock);

// A block that nobody uses: its first bytes link it to the next one.
struct Block {
  Block* next;
};

// What a thread keeps. Plain data at a fixed offset from the thread pointer; `Owner` frees it.
struct Kept {
  std::array<Block*, kClasses> heads;
  std::array<std::uint32_t, kClasses> counts;
  enum class State : std::uint8_t { kNew, kOpen, kEnded } state;
};
[[gnu::tls_model("initial-exec")]] constinit thread_local Kept kept{};

// Frees what the thread keeps when it ends. Tensors that die later free their blocks at once.
struct Owner {
  ~Owner() {
    kept.state = Kept::State::kEnded;
    for (Block*& head : kept.heads) {
      while (head != nullptr) {
        std::free(std::exchange(head, head->next));
      }
    }
    kept.counts = {};
  }
};

void open_kept() {
  thread_local const Owner owner;
  static_cast<void>(&owner);
  kept.state = Kept::State::kOpen;
}

constexpr std::size_t bytes_of(std::size_t block_class) { return kBlockAlignment << block_class; }

constexpr std::size_t class_of(std::size_t bytes) {
  if (bytes == 0 || bytes > bytes_of(kClasses - 1)) {
    return kNoClass;
  }
  return static_cast<std::size_t>(std::bit_width((bytes - 1) / kBlockAlignment));
}

void give_back(void* memory, std::size_t block_class) noexcept {
  if (kept.state == Kept::State::kOpen && kept.counts[block_class] < kMostKept) [[likely]] {
    auto* block = new (memory) Block{kept.heads[block_class]};
    kept.heads[block_class] = block;
    ++kept.counts[block_class];
    return;
  }
  std::free(memory);
}

template <std::size_t kClass>
void release(void* memory) {
  give_back(memory, kClass);
}

template <std::size_t... kIndices>
constexpr std::array<c10::DeleterFnPtr, kClasses> make_releases(
    std::index_sequence<kIndices...> /*indices*/) {
  return {&release<kIndices>...};
}
// A block carries no header: what frees it knows its size.
constexpr std::array<c10::DeleterFnPtr, kClasses> kReleases =
    make_releases(std::make_index_sequence<kClasses>());

// Null without memory.
void* take(std::size_t block_class) noexcept {
  if (Block* block = kept.heads[block_class]; block != nullptr) [[likely]] {
    kept.heads[block_class] = block->next;
    --kept.counts[block_class];
    return block;
  }
  if (kept.state == Kept::State::kNew) {
    open_kept();
  }
  return std::aligned_alloc(kBlockAlignment, bytes_of(block_class));
}

// A block for an object of `bytes`; throws without memory.
template <std::size_t kBytes>
struct InBlock {
  static constexpr std::size_t kClass = class_of(kBytes);
  static_assert(kClass != kNoClass);

  static void* take_or_throw() {
    void* const memory = take(kClass);
    if (memory == nullptr) [[unlikely]] {
      throw std::bad_alloc();
    }
    return memory;
  }
};

// The objects behind a tensor, in blocks that threads keep, too. Their destructors are virtual, so
// that who drops the last reference gives the block back, wherever and whenever that is.
class OutputStorage final : public c10::StorageImpl {
 public:
  using StorageImpl::StorageImpl;

  static void* operator new(std::size_t /*bytes*/) {
    return InBlock<sizeof(c10::StorageImpl)>::take_or_throw();
  }
  static void operator delete(void* memory) noexcept {
    give_back(memory, InBlock<sizeof(c10::StorageImpl)>::kClass);
  }
};
static_assert(sizeof(OutputStorage) == sizeof(c10::StorageImpl));

// A tensor like any other, but for where its object lies and what its constructor need not work
// out.
class OutputTensor final : public c10::TensorImpl {
 public:
  // What set_sizes_and_strides works out again for every tensor is the same for all of a spec.
  OutputTensor(c10::Storage&& storage, caffe2::TypeMeta dtype, const OutputForm& form)
      : TensorImpl(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype) {
    sizes_and_strides_ = form.sizes_and_strides;
    numel_ = form.numel;
    is_contiguous_ = form.contiguous;
    is_channels_last_ = form.channels_last;
    is_channels_last_contiguous_ = form.channels_last_contiguous;
    is_channels_last_3d_ = form.channels_last_3d;
    is_channels_last_3d_contiguous_ = form.channels_last_3d_contiguous;
    is_non_overlapping_and_dense_ = form.dense;
  }

  static void* operator new(std::size_t /*bytes*/) {
    return InBlock<sizeof(c10::TensorImpl)>::take_or_throw();
  }
  static void operator delete(void* memory) noexcept {
    give_back(memory, InBlock<sizeof(c10::TensorImpl)>::kClass);
  }

  OutputForm form() const {
    return {sizes_and_strides_,
            numel_,
            is_contiguous_,
            is_channels_last_,
            is_channels_last_contiguous_,
            is_channels_last_3d_,
            is_channels_last_3d_contiguous_,
            is_non_overlapping_and_dense_};
  }
};
static_assert(sizeof(OutputTensor) == sizeof(c10::TensorImpl));

std::size_t bytes_needed(c10::ScalarType dtype, const std::vector<std::int64_t>& sizes,
                         const std::vector<std::int64_t>& strides) {
  return at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype));
}

// What PyTorch makes of these sizes and strides.
OutputForm form_of(c10::ScalarType dtype, const std::vector<std::int64_t>& sizes,
                   const std::vector<std::int64_t>& strides) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), c10::SymInt(0), c10::GetDefaultCPUAllocator(),
      /*resizable=*/true);
  const auto tensor = c10::make_intrusive<OutputTensor>(
      std::move(storage), c10::scalarTypeToTypeMeta(dtype), OutputForm());
  tensor->set_sizes_and_strides(sizes, strides);
  return tensor->form();
}

// Memory and storage for a tensor of some bytes, of which `block_class` is the class.
c10::Storage make_storage(std::size_t bytes, std::size_t block_class, c10::Allocator* allocator) {
  void* const memory = block_class != kNoClass ? take(block_class) : nullptr;
  c10::DataPtr data = memory != nullptr ? c10::DataPtr(memory, memory, kReleases[block_class],
                                                       c10::Device(c10::DeviceType::CPU))
                                        : allocate_block(bytes);
  auto storage = c10::make_intrusive<OutputStorage>(c10::StorageImpl::use_byte_size_t(),
                                                    c10::SymInt(static_cast<std::int64_t>(bytes)),
                                                    std::move(data), allocator,
                                                    /*resizable=*/true);
  return c10::Storage(std::move(storage));
}

}  // namespace

OutputSpec::OutputSpec(c10::ScalarType dtype, std::vector<std::int64_t> sizes,
                       std::vector<std::int64_t> strides)
    : dtype_(dtype),
      sizes_(std::move(sizes)),
      strides_(std::move(strides)),
      form_(form_of(dtype, sizes_, strides_)),
      bytes_(bytes_needed(dtype, sizes_, strides_)),
      block_class_(class_of(bytes_)) {}

at::Tensor OutputSpec::allocate() const {
  c10::Allocator* const allocator = c10::GetCPUAllocator();
  if (bytes_ == 0 || allocation_is_watched(allocator)) [[unlikely]] {
    return at::Tensor(at::detail::empty_strided_cpu(sizes_, strides_, dtype_));
  }
  return at::detail::make_tensor<OutputTensor>(make_storage(bytes_, block_class_, allocator),
                                               c10::scalarTypeToTypeMeta(dtype_), form_);
}

at::Tensor allocate_output(c10::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const std::size_t bytes =
      at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype));
  c10::Allocator* const allocator = c10::GetCPUAllocator();
  if (bytes == 0 || allocation_is_watched(allocator)) [[unlikely]] {
    return at::Tensor(at::detail::empty_strided_cpu(sizes, strides, dtype));
  }
  at::Tensor made =
      at::detail::make_tensor<OutputTensor>(make_storage(bytes, class_of(bytes), allocator),
                                            c10::scalarTypeToTypeMeta(dtype), OutputForm());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

std::size_t kept_blocks() noexcept {
  std::size_t sum = 0;
  for (const std::uint32_t count : kept.counts) {
    sum += count;
  }
  return sum;
}

}  // namespace eagercache
