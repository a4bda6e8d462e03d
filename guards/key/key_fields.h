#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "guards/base/left_out.h"

// The list of everything a call key holds: one row per field, each at a fixed place in one class of
// 64-bit word. The encoder can write a bit only through field_bits<KeyField::k...>(), so a field
// that is not in this list does not compile; the decoder rejects every bit that is in no row; and
// the test of this list changes each field alone and demands a different key and a different text.
//
// A row is X(name, word class, bit offset, bits, scope, hazard). `scope` says whether the field
// also tells calls apart between processes (kPersistent) or only inside one (kInMemory). `hazard`
// names what would go wrong without the field. Offsets and widths are part of the persistent key:
// append, never move.
namespace eagercache {

enum class KeyWord : std::uint8_t {
  kState,          // first word of every key
  kPlainHeader,    // an argument whose payload has a fixed size
  kCountedHeader,  // an argument with `count` elements or bytes
  kTensorHeader,
  kTensorSize,
  kTensorStride,
  kInt,
  kFloat,
  kBool,
  kComplexReal,
  kComplexImaginary,
  kStringBytes,
  kElement,  // of a list of integers, doubles or booleans
  kScalarType,
  kLayout,
  kMemoryFormat,
  kDevice,
};
inline constexpr std::size_t kKeyWordClasses = static_cast<std::size_t>(KeyWord::kDevice) + 1;

enum class KeyScope : std::uint8_t { kPersistent, kInMemory };

// clang-format off
#define EAGERCACHE_KEY_FIELDS(X)                                                                        \
  X(StateDefaultDtype,       State,           0,  8, Persistent, "numerics: dtype promotion, default dtype")          \
  X(StateDeterministic,      State,           8,  1, Persistent, "numerics: deterministic algorithms")                \
  X(StateWarnOnly,           State,           9,  1, Persistent, "numerics: deterministic algorithms, warn-only")     \
  X(StateFillUninitialized,  State,          10,  1, Persistent, "numerics: fill uninitialised memory")               \
  X(StateAutocast,           State,          16,  1, Persistent, "numerics: autocast in an operator that is a function") \
  X(StateAutocastDtype,      State,          17,  8, Persistent, "numerics: autocast's dtype")                        \
  X(StateNumThreads,         State,          32, 16, Persistent, "numerics: reductions split by thread count")        \
  X(PlainKind,               PlainHeader,     0,  8, Persistent, "scalars: None, undefined tensor and value differ")  \
  X(CountedKind,             CountedHeader,   0,  8, Persistent, "scalars: list kinds differ")                        \
  X(CountedCount,            CountedHeader,  32, 32, Persistent, "tensor kinds: lists with holes, length")            \
  X(TensorKind,              TensorHeader,    0,  8, Persistent, "scalars: Python scalar or 0-dim tensor")            \
  X(TensorDtype,             TensorHeader,    8,  8, Persistent, "scalars: dtype promotion")                          \
  X(TensorDeviceType,        TensorHeader,   16,  8, Persistent, "scalars: 0-dim CPU tensor beside CUDA tensors")     \
  X(TensorDeviceIndex,       TensorHeader,   24,  8, InMemory,   "CUDA: one loaded module per device")                \
  X(TensorRank,              TensorHeader,   32,  8, Persistent, "layout: exact sizes and strides")                   \
  X(TensorWrapped,           TensorHeader,   40,  1, Persistent, "scalars: wrapped numbers promote differently")      \
  X(TensorAligned,           TensorHeader,   41,  1, Persistent, "layout: alignment of the data pointer")             \
  X(TensorSize,              TensorSize,      0, 64, Persistent, "layout: exact sizes; static shapes")                \
  X(TensorStride,            TensorStride,    0, 64, Persistent, "layout: exact strides, those of size-1 dimensions too") \
  X(IntValue,                Int,             0, 64, Persistent, "scalars: int64's full range")                       \
  X(FloatBits,               Float,           0, 64, Persistent, "scalars: -0.0 is not 0.0, NaN equals itself")       \
  X(BoolValue,               Bool,            0,  1, Persistent, "scalars: bool is not int")                          \
  X(ComplexRealBits,         ComplexReal,     0, 64, Persistent, "scalars: exact 128 bits")                           \
  X(ComplexImaginaryBits,    ComplexImaginary, 0, 64, Persistent, "scalars: exact 128 bits")                          \
  X(StringBytes,             StringBytes,     0, 64, Persistent, "scalars: exact bytes")                              \
  X(ElementBits,             Element,         0, 64, Persistent, "scalars: exact bits of every list element")          \
  X(ScalarTypeValue,         ScalarType,      0, 64, Persistent, "scalars: dtype promotion")                          \
  X(LayoutValue,             Layout,          0, 64, Persistent, "tensor kinds: sparse and others")                   \
  X(MemoryFormatValue,       MemoryFormat,    0, 64, Persistent, "layout: channels_last and other permutations")      \
  X(DeviceIndex,             Device,          0,  8, InMemory,   "CUDA: device without index; one module per device") \
  X(DeviceType,              Device,          8,  8, Persistent, "scalars: mixed devices")
// clang-format on

enum class KeyField : std::uint8_t {
#define EAGERCACHE_X(name, word, offset, bits, scope, hazard) k##name,
  EAGERCACHE_KEY_FIELDS(EAGERCACHE_X)
#undef EAGERCACHE_X
};

struct KeyFieldInfo {
  KeyField field;
  const char* name;
  KeyWord word;
  unsigned offset;  // bits
  unsigned bits;
  KeyScope scope;
  const char* hazard;

  constexpr std::uint64_t mask() const noexcept {
    return (~std::uint64_t{0} >> (64 - bits)) << offset;
  }
};

inline constexpr KeyFieldInfo kKeyFields[] = {
#define EAGERCACHE_X(name, word, offset, bits, scope, hazard) \
  {KeyField::k##name, #name, KeyWord::k##word, offset, bits, KeyScope::k##scope, hazard},
    EAGERCACHE_KEY_FIELDS(EAGERCACHE_X)
#undef EAGERCACHE_X
};
inline constexpr std::size_t kKeyFieldCount = sizeof(kKeyFields) / sizeof(kKeyFields[0]);

constexpr const KeyFieldInfo& field_info(KeyField field) noexcept {
  return kKeyFields[static_cast<std::size_t>(field)];
}

// The bits of a word class that some field owns.
constexpr std::uint64_t used_bits(KeyWord word) noexcept {
  std::uint64_t bits = 0;
  for (const KeyFieldInfo& info : kKeyFields) {
    if (info.word == word) bits |= info.mask();
  }
  return bits;
}

// The bits of a word class that identify a call between processes.
constexpr std::uint64_t persistent_bits(KeyWord word) noexcept {
  std::uint64_t bits = 0;
  for (const KeyFieldInfo& info : kKeyFields) {
    if (info.word == word && info.scope == KeyScope::kPersistent) bits |= info.mask();
  }
  return bits;
}

namespace key_fields_detail {

constexpr bool rows_are_sound() noexcept {
  std::uint64_t seen[kKeyWordClasses] = {};
  for (std::size_t i = 0; i < kKeyFieldCount; ++i) {
    const KeyFieldInfo& info = kKeyFields[i];
    if (static_cast<std::size_t>(info.field) != i) return false;
    if (info.bits == 0 || info.offset + info.bits > 64) return false;
    std::uint64_t& bits = seen[static_cast<std::size_t>(info.word)];
    if ((bits & info.mask()) != 0) return false;
    bits |= info.mask();
  }
  for (const std::uint64_t bits : seen) {
    if (bits == 0) return false;
  }
  return true;
}

// A bool has one significant bit, whatever its storage.
template <typename Value>
inline constexpr unsigned kValueBits = std::is_same_v<Value, bool> ? 1 : sizeof(Value) * 8;

}  // namespace key_fields_detail

static_assert(key_fields_detail::rows_are_sound(),
              "key fields of one word overlap, leave the word, or a word class has no field");
// The decoder learns an argument's class of header from its kind, so the kind has one place.
static_assert(field_info(KeyField::kPlainKind).mask() == field_info(KeyField::kTensorKind).mask() &&
              field_info(KeyField::kPlainKind).mask() == field_info(KeyField::kCountedKind).mask());

// Bits of one class of key word. Only field_bits() makes them, and only bits of one class combine.
template <KeyWord kClass>
class KeyBits {
 public:
  constexpr std::uint64_t word() const noexcept { return word_; }
  friend constexpr KeyBits operator|(KeyBits left, KeyBits right) noexcept {
    return KeyBits(left.word_ | right.word_);
  }

 private:
  template <KeyField kField, typename Value>
  friend constexpr auto field_bits(Value value) noexcept;
  constexpr explicit KeyBits(std::uint64_t word) noexcept : word_(word) {}
  std::uint64_t word_;
};

// `value` in its place. An unsigned type as wide as the field at most, so that nothing is cut off.
template <KeyField kField, typename Value>
constexpr auto field_bits(Value value) noexcept {
  constexpr KeyFieldInfo kInfo = field_info(kField);
  static_assert(std::is_unsigned_v<Value>, "convert signed values to two's complement first");
  static_assert(key_fields_detail::kValueBits<Value> <= kInfo.bits, "the value does not fit");
  if constexpr (kMutations) {
    if (!std::is_constant_evaluated() && left_out("field", kInfo.name)) value = Value{};
  }
  return KeyBits<kInfo.word>(static_cast<std::uint64_t>(value) << kInfo.offset);
}

template <KeyField kField>
constexpr std::uint64_t read_field(std::uint64_t word) noexcept {
  constexpr KeyFieldInfo kInfo = field_info(kField);
  return (word & kInfo.mask()) >> kInfo.offset;
}

}  // namespace eagercache
