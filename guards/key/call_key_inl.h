#pragma once

#include <bit>
#include <cstring>

#include "guards/key/key_fields.h"

// The hot half of call_key.h, which ends by including it; nobody else does. Every call of a hooked
// operator runs this.
namespace eagercache {

namespace call_key_detail {

constexpr KeyBits<KeyWord::kPlainHeader> plain_header(ArgumentKind kind) noexcept {
  return field_bits<KeyField::kPlainKind>(static_cast<std::uint8_t>(kind));
}

// Index -1 (no index) becomes 0; all 256 indices have their own pattern.
constexpr std::uint8_t biased_index(std::int8_t index) noexcept {
  return static_cast<std::uint8_t>(static_cast<std::uint8_t>(index) + 1U);
}
constexpr std::int8_t unbiased_index(std::uint64_t biased) noexcept {
  return static_cast<std::int8_t>(static_cast<std::uint8_t>(biased - 1U));
}

inline Word multiply_mix(Word left, Word right) noexcept {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(left) * right;
  return static_cast<Word>(product) ^ static_cast<Word>(product >> 64);
}

}  // namespace call_key_detail

inline KeyBuffer::Room KeyBuffer::extend(std::size_t count) noexcept {
  if (count > room_ - size_ && !grow(count)) [[unlikely]] {
    overflowed_ = true;
    return {nullptr};
  }
  Word* const room = words_ + size_;
  size_ += count;
  return {room};
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_plain(ArgumentKind kind) noexcept {
  if (auto room = sink().extend(1)) room.set(0, call_key_detail::plain_header(kind).word());
}

template <typename Sink>
template <KeyWord kClass>
inline void KeyEncoder<Sink>::put_scalar(ArgumentKind kind, KeyBits<kClass> payload) noexcept {
  auto room = sink().extend(2);
  if (!room) return;
  room.set(0, call_key_detail::plain_header(kind).word());
  room.set(1, payload.word());
}

template <typename Sink>
inline auto KeyEncoder<Sink>::put_counted(ArgumentKind kind, std::size_t count,
                                          std::size_t payload) noexcept {
  static_assert(KeyBuffer::kCapacity * sizeof(Word) <= UINT32_MAX);
  const bool fits = count <= KeyBuffer::kCapacity * sizeof(Word);
  if (!fits) [[unlikely]] {
    sink().overflow();
  }
  // No key has room for so many words.
  auto room = sink().extend(fits ? 1 + payload : KeyBuffer::kCapacity + 1);
  if (room) {
    room.set(0, (field_bits<KeyField::kCountedKind>(static_cast<std::uint8_t>(kind)) |
                 field_bits<KeyField::kCountedCount>(static_cast<std::uint32_t>(count)))
                    .word());
  }
  return room;
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_state(const GlobalState& state) noexcept {
  auto room = sink().extend(1);
  if (!room) return;
  room.set(0, (field_bits<KeyField::kStateDefaultDtype>(state.default_dtype) |
               field_bits<KeyField::kStateDeterministic>(state.deterministic) |
               field_bits<KeyField::kStateWarnOnly>(state.deterministic_warn_only) |
               field_bits<KeyField::kStateFillUninitialized>(state.fill_uninitialized_memory) |
               field_bits<KeyField::kStateAutocast>(state.autocast) |
               field_bits<KeyField::kStateAutocastDtype>(state.autocast_dtype) |
               field_bits<KeyField::kStateNumThreads>(state.num_threads))
                  .word());
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_none() noexcept {
  put_plain(ArgumentKind::kNone);
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_undefined_tensor() noexcept {
  put_plain(ArgumentKind::kUndefinedTensor);
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_tensor(const TensorTraits& traits, const std::int64_t* sizes,
                                         const std::int64_t* strides) noexcept {
  const std::size_t dim = traits.dim;
  auto room = sink().extend(1 + 2 * dim);
  if (!room) return;
  room.set(0, (field_bits<KeyField::kTensorKind>(static_cast<std::uint8_t>(ArgumentKind::kTensor)) |
               field_bits<KeyField::kTensorDtype>(traits.dtype) |
               field_bits<KeyField::kTensorDeviceType>(traits.device_type) |
               field_bits<KeyField::kTensorDeviceIndex>(
                   call_key_detail::biased_index(traits.device_index)) |
               field_bits<KeyField::kTensorRank>(traits.dim) |
               field_bits<KeyField::kTensorWrapped>(traits.wrapped_number) |
               field_bits<KeyField::kTensorAligned>(traits.aligned))
                  .word());
  for (std::size_t i = 0; i < dim; ++i) {
    room.set(1 + i, field_bits<KeyField::kTensorSize>(static_cast<Word>(sizes[i])).word());
    room.set(1 + dim + i,
             field_bits<KeyField::kTensorStride>(static_cast<Word>(strides[i])).word());
  }
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_tensor_list(std::size_t count) noexcept {
  put_counted(ArgumentKind::kTensorList, count, 0);
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_scalar_list(std::size_t count) noexcept {
  put_counted(ArgumentKind::kScalarList, count, 0);
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_int(std::int64_t value) noexcept {
  put_scalar(ArgumentKind::kInt, field_bits<KeyField::kIntValue>(static_cast<Word>(value)));
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_float(double value) noexcept {
  put_scalar(ArgumentKind::kFloat, field_bits<KeyField::kFloatBits>(std::bit_cast<Word>(value)));
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_bool(bool value) noexcept {
  put_scalar(ArgumentKind::kBool, field_bits<KeyField::kBoolValue>(value));
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_complex(double real, double imaginary) noexcept {
  auto room = sink().extend(3);
  if (!room) return;
  room.set(0, call_key_detail::plain_header(ArgumentKind::kComplex).word());
  room.set(1, field_bits<KeyField::kComplexRealBits>(std::bit_cast<Word>(real)).word());
  room.set(2, field_bits<KeyField::kComplexImaginaryBits>(std::bit_cast<Word>(imaginary)).word());
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_string(std::string_view value) noexcept {
  static_assert(std::endian::native == std::endian::little);
  const std::size_t payload = value.size() / sizeof(Word) + (value.size() % sizeof(Word) != 0);
  auto room = put_counted(ArgumentKind::kString, value.size(), payload);
  if (!room) return;
  for (std::size_t i = 0; i < payload; ++i) {
    const std::string_view part = value.substr(i * sizeof(Word), sizeof(Word));
    Word packed = 0;
    std::memcpy(&packed, part.data(), part.size());
    room.set(1 + i, field_bits<KeyField::kStringBytes>(packed).word());
  }
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_int_list(const std::int64_t* values, std::size_t count) noexcept {
  auto room = put_counted(ArgumentKind::kIntList, count, count);
  if (!room) return;
  for (std::size_t i = 0; i < count; ++i) {
    room.set(1 + i, field_bits<KeyField::kElementBits>(static_cast<Word>(values[i])).word());
  }
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_float_list(const double* values, std::size_t count) noexcept {
  auto room = put_counted(ArgumentKind::kFloatList, count, count);
  if (!room) return;
  for (std::size_t i = 0; i < count; ++i) {
    room.set(1 + i, field_bits<KeyField::kElementBits>(std::bit_cast<Word>(values[i])).word());
  }
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_bool_list_header(std::size_t count) noexcept {
  put_counted(ArgumentKind::kBoolList, count, 0);
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_int_list_header(std::size_t count) noexcept {
  put_counted(ArgumentKind::kIntList, count, 0);
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_float_list_header(std::size_t count) noexcept {
  put_counted(ArgumentKind::kFloatList, count, 0);
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_word(Word word) noexcept {
  if (auto room = sink().extend(1)) room.set(0, field_bits<KeyField::kElementBits>(word).word());
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_scalar_type(std::int64_t value) noexcept {
  put_scalar(ArgumentKind::kScalarType,
             field_bits<KeyField::kScalarTypeValue>(static_cast<Word>(value)));
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_layout(std::int64_t value) noexcept {
  put_scalar(ArgumentKind::kLayout, field_bits<KeyField::kLayoutValue>(static_cast<Word>(value)));
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_memory_format(std::int64_t value) noexcept {
  put_scalar(ArgumentKind::kMemoryFormat,
             field_bits<KeyField::kMemoryFormatValue>(static_cast<Word>(value)));
}

template <typename Sink>
inline void KeyEncoder<Sink>::put_device(std::int64_t type, std::int64_t index) noexcept {
  if (type < 0 || type > UINT8_MAX || index < INT8_MIN || index > INT8_MAX) [[unlikely]] {
    sink().overflow();
    return;
  }
  const std::uint8_t biased = call_key_detail::biased_index(static_cast<std::int8_t>(index));
  put_scalar(ArgumentKind::kDevice,
             field_bits<KeyField::kDeviceType>(static_cast<std::uint8_t>(type)) |
                 field_bits<KeyField::kDeviceIndex>(biased));
}

// Four independent lanes of 64x64 -> 128 bit multiplications, folded at the end, so that eight
// words cost two multiplications in a row. The constants are fractional digits of pi. Not made to
// withstand chosen inputs: equal hashes cost a comparison, never a false hit.
inline std::uint64_t hash_words(std::span<const Word> words) noexcept {
  using call_key_detail::multiply_mix;
  constexpr Word kLane0 = 0x243f6a8885a308d3;
  constexpr Word kLane1 = 0x13198a2e03707344;
  constexpr Word kLane2 = 0xa4093822299f31d1;
  constexpr Word kLane3 = 0x082efa98ec4e6c89;
  const Word* at = words.data();
  std::size_t left = words.size();
  Word a = kLane0 ^ left;
  Word b = kLane1;
  Word c = kLane2;
  Word d = kLane3;
  for (; left >= 8; at += 8, left -= 8) {
    a = multiply_mix(a ^ at[0], kLane1 ^ at[1]);
    b = multiply_mix(b ^ at[2], kLane2 ^ at[3]);
    c = multiply_mix(c ^ at[4], kLane3 ^ at[5]);
    d = multiply_mix(d ^ at[6], kLane0 ^ at[7]);
  }
  if (left != 0) {
    if ((left & 4) != 0) {
      a = multiply_mix(a ^ at[0], kLane1 ^ at[1]);
      b = multiply_mix(b ^ at[2], kLane2 ^ at[3]);
      at += 4;
    }
    if ((left & 2) != 0) {
      c = multiply_mix(c ^ at[0], kLane3 ^ at[1]);
      at += 2;
    }
    if ((left & 1) != 0) d = multiply_mix(d ^ at[0], kLane0);
  }
  return multiply_mix(a ^ std::rotl(c, 23) ^ kLane3, b ^ std::rotl(d, 41) ^ kLane0);
}

}  // namespace eagercache
