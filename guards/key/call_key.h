#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "guards/key/key_fields.h"

// The call key: everything about one operator call that a compiled kernel's code may depend on, as
// a flat run of 64-bit words. Built on the stack on every call, compared word by word, and hashed;
// also written into the store (as a digest) and turned into text for the compile service.
//
// Layout: word 0 is the global state (StateWord); then each argument of the schema, in schema
// order, defaults included, as a header word (ArgumentKind, flags, count) followed by its payload.
// Every argument contributes at least its header, so positions are absolute and two different
// argument lists never give the same words (the encoding is prefix-free, argument by argument).
//
// A spurious miss is tolerable; a false hit never is.
namespace eagercache {

using Word = std::uint64_t;

// Argument tags. The numbers are part of the persistent key: append, never renumber.
enum class ArgumentKind : std::uint8_t {
  kNone = 1,             // an optional that holds nothing
  kUndefinedTensor = 2,  // a tensor object without storage: not None
  kTensor = 3,           // header flags, then `count` sizes, then `count` strides
  kTensorList = 4,     // `count` elements follow, each a tensor, undefined tensor or None (a hole)
  kInt = 5,            // one word: two's complement
  kFloat = 6,          // one word: the double's bits (so -0.0 is not 0.0 and NaN equals itself)
  kBool = 7,           // one word: 0 or 1; never equal to kInt
  kComplex = 8,        // two words: bits of the real and the imaginary part
  kString = 9,         // `count` bytes, packed little-endian, zero-padded to whole words
  kIntList = 10,       // `count` words
  kFloatList = 11,     // `count` words
  kBoolList = 12,      // `count` words
  kScalarType = 13,    // one word: c10::ScalarType's number
  kLayout = 14,        // one word
  kMemoryFormat = 15,  // one word
  kDevice = 16,        // one word: type << 8 | (index + 1)
  kScalarList = 17,    // `count` elements follow, each kInt, kFloat, kBool or kComplex
};

// What the key knows of one tensor besides sizes and strides.
struct TensorTraits {
  std::uint8_t dtype = 0;         // c10::ScalarType's number
  std::uint8_t device_type = 0;   // c10::DeviceType's number
  std::int8_t device_index = -1;  // in the in-memory key only; masked out of the persistent one
  std::uint8_t dim = 0;           // rank
  bool wrapped_number = false;    // came from a Python number: promotes differently
  bool aligned = true;            // data pointer is a multiple of kAlignment
  friend bool operator==(const TensorTraits&, const TensorTraits&) = default;
};

inline constexpr std::size_t kAlignment = 64;  // bytes; at::Tensor storage on CPU starts so aligned

// Process and thread state that changes what native computes. One word.
struct GlobalState {
  std::uint8_t default_dtype = 0;  // c10::ScalarType's number
  bool deterministic = false;      // torch.use_deterministic_algorithms
  bool deterministic_warn_only = false;
  bool fill_uninitialized_memory = false;
  std::uint16_t num_threads = 1;  // at::get_num_threads(): reductions split by it
  // Autocast of the call's device, for operators that are functions (ArgumentPlan::reads_autocast):
  // the operators that they call are below it. ATen's own are not.
  bool autocast = false;
  std::uint8_t autocast_dtype = 0;  // c10::ScalarType's number; 0 where it is off
  friend bool operator==(const GlobalState&, const GlobalState&) = default;
};

// How values become words: the one encoding, for the writer of a key and for what compares a call
// with a key. `Sink` has
//   Room extend(std::size_t count)  room for so many more words; false where there is none
//   void overflow()                 notes that there is none
// where a Room is false or takes its words by set(index, word), each once.
template <typename Sink>
class KeyEncoder {
 public:
  void put_state(const GlobalState& state) noexcept;
  void put_none() noexcept;
  void put_undefined_tensor() noexcept;
  // sizes and strides have traits.dim elements each.
  void put_tensor(const TensorTraits& traits, const std::int64_t* sizes,
                  const std::int64_t* strides) noexcept;
  void put_tensor_list(std::size_t count) noexcept;  // then `count` elements
  void put_scalar_list(std::size_t count) noexcept;  // then `count` scalars
  void put_int(std::int64_t value) noexcept;
  void put_float(double value) noexcept;
  void put_bool(bool value) noexcept;
  void put_complex(double real, double imaginary) noexcept;
  void put_string(std::string_view value) noexcept;
  void put_int_list_header(std::size_t count) noexcept;  // then `count` put_word(two's complement)
  void put_float_list_header(std::size_t count) noexcept;  // then `count` put_word(a double's bits)
  void put_int_list(const std::int64_t* values, std::size_t count) noexcept;
  void put_float_list(const double* values, std::size_t count) noexcept;
  void put_bool_list_header(std::size_t count) noexcept;  // then `count` put_word(0 or 1)
  void put_scalar_type(std::int64_t value) noexcept;
  void put_layout(std::int64_t value) noexcept;
  void put_memory_format(std::int64_t value) noexcept;
  // Out of the ranges of uint8 and int8: overflows.
  void put_device(std::int64_t type, std::int64_t index) noexcept;
  void put_word(Word word) noexcept;  // one element of a list whose header was put before

 private:
  Sink& sink() noexcept { return static_cast<Sink&>(*this); }
  void put_plain(ArgumentKind kind) noexcept;
  // Header of a list of `count` elements in the first of 1 + payload words of room.
  auto put_counted(ArgumentKind kind, std::size_t count, std::size_t payload) noexcept;
  template <KeyWord kClass>
  void put_scalar(ArgumentKind kind, KeyBits<kClass> payload) noexcept;
};

// Writer for a key. Keys of up to kInline words allocate nothing, longer ones (lists of tensors)
// once; past the capacity, or without memory, it only remembers that it overflowed, and the call
// steps aside to native.
class KeyBuffer : public KeyEncoder<KeyBuffer> {
 public:
  static constexpr std::size_t kInline = 512;     // words; cat of 60 four-dimensional tensors
  static constexpr std::size_t kCapacity = 4096;  // an optimizer's step over 300 matrices

  KeyBuffer() noexcept {}  // inline_ stays uninitialised on purpose: 4 KB would cost 40 ns to clear
  KeyBuffer(const KeyBuffer&) = delete;
  KeyBuffer& operator=(const KeyBuffer&) = delete;

  void clear() noexcept {
    size_ = 0;
    overflowed_ = false;
  }
  bool overflowed() const noexcept { return overflowed_; }
  std::span<const Word> words() const noexcept { return {words_, size_}; }

 private:
  friend KeyEncoder<KeyBuffer>;

  struct Room {
    Word* at;
    explicit operator bool() const noexcept { return at != nullptr; }
    void set(std::size_t index, Word word) const noexcept { at[index] = word; }
  };
  Room extend(std::size_t count) noexcept;
  void overflow() noexcept { overflowed_ = true; }
  // Moves to memory of kCapacity words; false where that is not enough or not to be had.
  bool grow(std::size_t count) noexcept;

  Word inline_[kInline];  // NOLINT(modernize-avoid-c-arrays)
  Word* words_ = inline_;
  std::size_t room_ = kInline;
  std::unique_ptr<Word[]> long_;  // NOLINT(modernize-avoid-c-arrays)
  std::size_t size_ = 0;
  bool overflowed_ = false;
};

// Compares a call with the words of a key, which stay alive and unchanged meanwhile. Stores
// nothing.
class KeyMatcher : public KeyEncoder<KeyMatcher> {
 public:
  explicit KeyMatcher(std::span<const Word> words) noexcept
      : next_(words.data()), end_(words.data() + words.size()) {}
  KeyMatcher(const KeyMatcher&) = delete;
  KeyMatcher& operator=(const KeyMatcher&) = delete;

  // Whether what was put is exactly the words.
  bool matched() const noexcept { return difference_ == 0 && next_ == end_; }

 private:
  friend KeyEncoder<KeyMatcher>;

  class Room {
   public:
    Room(const Word* at, Word& difference) noexcept : at_(at), difference_(difference) {}
    ~Room() { difference_ |= mine_; }
    Room(Room&& other) noexcept
        : at_(other.at_), difference_(other.difference_), mine_(std::exchange(other.mine_, 0)) {}
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;
    explicit operator bool() const noexcept { return at_ != nullptr; }
    void set(std::size_t index, Word word) noexcept { mine_ |= at_[index] ^ word; }

   private:
    const Word* const at_;
    Word& difference_;
    Word mine_ = 0;  // in a register, until the room is full
  };
  Room extend(std::size_t count) noexcept {
    if (count > static_cast<std::size_t>(end_ - next_)) [[unlikely]] {
      overflow();
      return {nullptr, difference_};
    }
    const Word* const at = next_;
    next_ += count;
    return {at, difference_};
  }
  void overflow() noexcept { difference_ = 1; }

  const Word* next_;
  const Word* const end_;
  Word difference_ = 0;  // not 0 once a word was another
};

// A 64-bit hash of the words; equal words give equal hashes in every process of this build. Not
// part of any file format.
std::uint64_t hash_words(std::span<const Word> words) noexcept;

// An owned, decoded argument (a tree of depth at most two: lists of tensors or scalars).
struct DecodedArgument {
  ArgumentKind kind = ArgumentKind::kNone;
  TensorTraits tensor;                    // kTensor
  std::vector<std::int64_t> sizes;        // kTensor
  std::vector<std::int64_t> strides;      // kTensor
  std::vector<Word> payload;              // scalars and lists of them, as encoded
  std::string text;                       // kString
  std::vector<DecodedArgument> elements;  // kTensorList, kScalarList
  friend bool operator==(const DecodedArgument&, const DecodedArgument&) = default;
};

// What an argument of kDevice names; index -1: none.
struct NamedDevice {
  std::uint8_t type = 0;  // c10::DeviceType's number
  std::int8_t index = -1;
};
NamedDevice named_device(const DecodedArgument& argument);

// A key as its parts.
struct DecodedCall {
  GlobalState state;
  std::vector<DecodedArgument> arguments;
  friend bool operator==(const DecodedCall&, const DecodedCall&) = default;
};

// Reads a key back. False when the words are not the encoding of any call (never crashes on any
// input). decode(encode(call)) == call, and encode(decode(words)) == words.
// encode_call refuses (false) what is no call: values where the kind has none, or past the
// capacity.
bool decode_call(std::span<const Word> words, DecodedCall* call);
bool encode_call(const DecodedCall& call, KeyBuffer* buffer);

// The words that identify the call between processes: the same, with the in-memory fields of
// key_fields.h as if no device had an index. Empty when the words do not decode.
std::vector<Word> persistent_words(std::span<const Word> words);

// JSON of the call for the compile service, manifests and people:
//   {"state": {"default_dtype": "float32", "deterministic": false,
//    "deterministic_warn_only": false,
//    "fill_uninitialized_memory": false,
//    "num_threads": 1}, "args": [...]}             and "autocast": "bfloat16" where it is on
// with one object per argument, in schema order:
//   {"kind": "none"}  {"kind": "undefined_tensor"}
//   {"kind": "tensor", "dtype": "float32", "device": "cpu", "sizes": [...], "strides": [...],
//    "wrapped": false, "aligned": true}            "device" is "cuda:1" where there is an index
//   {"kind": "tensor_list", "elements": [tensor, undefined_tensor or none, ...]}
//   {"kind": "int", "value": 3}  {"kind": "bool", "value": true}  {"kind": "string", "value": "x"}
//   {"kind": "float", "value": "1.0", "bits": "0x3ff0000000000000"}
//   {"kind": "complex", "value": ["1.0", "-2.0"], "real": "0x...", "imag": "0x..."}
//   {"kind": "int_list", "values": [1, 2]}  {"kind": "bool_list", "values": [true]}
//   {"kind": "float_list", "values": ["1.5"], "bits": ["0x..."]}
//   {"kind": "scalar_list", "elements": [int, float, bool or complex, ...]}
//   {"kind": "scalar_type", "value": 6, "dtype": "float32"}
//   {"kind": "layout", "value": 0, "layout": "strided"}
//   {"kind": "memory_format", "value": 0, "memory_format": "contiguous_format"}
//   {"kind": "device", "type": 1, "index": 0, "device": "cuda:0"}    "index" -1: none
// Integers have int64's full range. Doubles are exact in "bits"; their text reads back as the same
// number, except that every NaN is "nan". A string that is not UTF-8 has "hex" in place of "value".
// `names`, when given, adds "name" per argument. Empty when the words do not decode.
std::string describe_call(std::span<const Word> words, std::span<const std::string> names = {});

// The key of a call described as above (names are not looked at). False, with what is wrong, when
// the text is no description of a call; what `buffer` then holds is unspecified. Where a name and a
// number say the same ("dtype" and "value"), the name counts and the number may be left out.
bool parse_call(std::string_view text, KeyBuffer* buffer, std::string* problem);

// Text of the first difference between two calls of one operator, as `explain` shows it
// ("argument 0: sizes [8, 4] is not [8, 8]", "argument 1 (other): int is not float"); empty only
// when they are equal.
std::string first_difference(std::span<const Word> left, std::span<const Word> right,
                             std::span<const std::string> names = {});

// "float32" for 6, and so on, by c10::ScalarType's append-only numbering; "dtype<N>" for unknown
// ones.
std::string scalar_type_name(std::uint8_t dtype);

}  // namespace eagercache

#include "guards/key/call_key_inl.h"
