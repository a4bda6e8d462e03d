#include "guards/key/call_key.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "guards/key/key_fields.h"

// One parser, KeyReader, says for every word of a key which class it is, and rejects whatever the
// encoder cannot have written. Decoding and masking both go through it, so what is accepted is
// exactly what encodes back to the same words.
namespace eagercache {
namespace {

using call_key_detail::unbiased_index;

// Takes words off a key that may be anything: every read says whether it was possible.
class KeyReader {
 public:
  explicit KeyReader(std::span<const Word> words) noexcept : words_(words) {}

  bool at_end() const noexcept { return next_ == words_.size(); }
  std::size_t left() const noexcept { return words_.size() - next_; }

  // The next word's bits, of which only those of class `kind` may be set.
  bool read(KeyWord kind, Word* word) noexcept {
    if (at_end() || (words_[next_] & ~used_bits(kind)) != 0) return false;
    *word = words_[next_++];
    if (classes_ != nullptr) classes_->push_back(kind);
    return true;
  }

  bool read_list(KeyWord kind, std::size_t count, std::vector<Word>* list) {
    if (count > left()) return false;
    list->resize(count);
    for (Word& word : *list) {
      if (!read(kind, &word)) return false;
    }
    return true;
  }

  bool peek_kind(ArgumentKind* kind) const noexcept {
    if (at_end()) return false;
    *kind = static_cast<ArgumentKind>(read_field<KeyField::kPlainKind>(words_[next_]));
    return true;
  }

  // From here on, the class of every word read is appended to `classes`.
  void record_classes(std::vector<KeyWord>* classes) noexcept { classes_ = classes; }

 private:
  std::span<const Word> words_;
  std::size_t next_ = 0;
  std::vector<KeyWord>* classes_ = nullptr;
};

bool read_state(KeyReader& reader, GlobalState* state) {
  Word word;
  if (!reader.read(KeyWord::kState, &word)) return false;
  state->default_dtype = static_cast<std::uint8_t>(read_field<KeyField::kStateDefaultDtype>(word));
  state->deterministic = read_field<KeyField::kStateDeterministic>(word) != 0;
  state->deterministic_warn_only = read_field<KeyField::kStateWarnOnly>(word) != 0;
  state->fill_uninitialized_memory = read_field<KeyField::kStateFillUninitialized>(word) != 0;
  state->autocast = read_field<KeyField::kStateAutocast>(word) != 0;
  state->autocast_dtype =
      static_cast<std::uint8_t>(read_field<KeyField::kStateAutocastDtype>(word));
  state->num_threads = static_cast<std::uint16_t>(read_field<KeyField::kStateNumThreads>(word));
  return true;
}

bool read_tensor(KeyReader& reader, DecodedArgument* argument) {
  Word word;
  if (!reader.read(KeyWord::kTensorHeader, &word)) return false;
  TensorTraits& traits = argument->tensor;
  traits.dtype = static_cast<std::uint8_t>(read_field<KeyField::kTensorDtype>(word));
  traits.device_type = static_cast<std::uint8_t>(read_field<KeyField::kTensorDeviceType>(word));
  traits.device_index = unbiased_index(read_field<KeyField::kTensorDeviceIndex>(word));
  traits.dim = static_cast<std::uint8_t>(read_field<KeyField::kTensorRank>(word));
  traits.wrapped_number = read_field<KeyField::kTensorWrapped>(word) != 0;
  traits.aligned = read_field<KeyField::kTensorAligned>(word) != 0;
  std::vector<Word> sizes;
  std::vector<Word> strides;
  if (!reader.read_list(KeyWord::kTensorSize, traits.dim, &sizes) ||
      !reader.read_list(KeyWord::kTensorStride, traits.dim, &strides)) {
    return false;
  }
  argument->sizes.assign(sizes.begin(), sizes.end());
  argument->strides.assign(strides.begin(), strides.end());
  return true;
}

bool read_string(KeyReader& reader, std::size_t bytes, std::string* text) {
  const std::size_t count = bytes / sizeof(Word) + (bytes % sizeof(Word) != 0);
  std::vector<Word> packed;
  if (!reader.read_list(KeyWord::kStringBytes, count, &packed)) return false;
  text->resize(count * sizeof(Word));
  if (count != 0) std::memcpy(text->data(), packed.data(), text->size());
  if (text->find_first_not_of('\0', bytes) != std::string::npos) return false;
  text->resize(bytes);
  return true;
}

bool is_scalar(ArgumentKind kind) noexcept {
  return kind == ArgumentKind::kInt || kind == ArgumentKind::kFloat ||
         kind == ArgumentKind::kBool || kind == ArgumentKind::kComplex;
}

bool is_tensor_element(ArgumentKind kind) noexcept {
  return kind == ArgumentKind::kTensor || kind == ArgumentKind::kUndefinedTensor ||
         kind == ArgumentKind::kNone;
}

bool read_argument(KeyReader& reader, DecodedArgument* argument);

bool read_elements(KeyReader& reader, std::size_t count, bool (*admits)(ArgumentKind),
                   std::vector<DecodedArgument>* elements) {
  // Every element has at least its header, which bounds what a forged count can make us allocate.
  if (count > reader.left()) return false;
  elements->resize(count);
  for (DecodedArgument& element : *elements) {
    ArgumentKind kind;
    if (!reader.peek_kind(&kind) || !admits(kind) || !read_argument(reader, &element)) return false;
  }
  return true;
}

bool read_counted(KeyReader& reader, DecodedArgument* argument) {
  Word header;
  if (!reader.read(KeyWord::kCountedHeader, &header)) return false;
  const std::size_t count = read_field<KeyField::kCountedCount>(header);
  switch (argument->kind) {
    case ArgumentKind::kTensorList:
      return read_elements(reader, count, is_tensor_element, &argument->elements);
    case ArgumentKind::kScalarList:
      return read_elements(reader, count, is_scalar, &argument->elements);
    case ArgumentKind::kString:
      return read_string(reader, count, &argument->text);
    case ArgumentKind::kBoolList:
      if (!reader.read_list(KeyWord::kElement, count, &argument->payload)) return false;
      for (const Word element : argument->payload) {
        if (element > 1) return false;
      }
      return true;
    default:
      return reader.read_list(KeyWord::kElement, count, &argument->payload);
  }
}

bool read_plain(KeyReader& reader, std::initializer_list<KeyWord> payload,
                DecodedArgument* argument) {
  Word word;
  if (!reader.read(KeyWord::kPlainHeader, &word)) return false;
  for (const KeyWord kind : payload) {
    if (!reader.read(kind, &word)) return false;
    argument->payload.push_back(word);
  }
  return true;
}

bool read_argument(KeyReader& reader, DecodedArgument* argument) {
  if (!reader.peek_kind(&argument->kind)) return false;
  switch (argument->kind) {
    case ArgumentKind::kNone:
    case ArgumentKind::kUndefinedTensor:
      return read_plain(reader, {}, argument);
    case ArgumentKind::kTensor:
      return read_tensor(reader, argument);
    case ArgumentKind::kInt:
      return read_plain(reader, {KeyWord::kInt}, argument);
    case ArgumentKind::kFloat:
      return read_plain(reader, {KeyWord::kFloat}, argument);
    case ArgumentKind::kBool:
      return read_plain(reader, {KeyWord::kBool}, argument);
    case ArgumentKind::kComplex:
      return read_plain(reader, {KeyWord::kComplexReal, KeyWord::kComplexImaginary}, argument);
    case ArgumentKind::kScalarType:
      return read_plain(reader, {KeyWord::kScalarType}, argument);
    case ArgumentKind::kLayout:
      return read_plain(reader, {KeyWord::kLayout}, argument);
    case ArgumentKind::kMemoryFormat:
      return read_plain(reader, {KeyWord::kMemoryFormat}, argument);
    case ArgumentKind::kDevice:
      return read_plain(reader, {KeyWord::kDevice}, argument);
    case ArgumentKind::kTensorList:
    case ArgumentKind::kString:
    case ArgumentKind::kIntList:
    case ArgumentKind::kFloatList:
    case ArgumentKind::kBoolList:
    case ArgumentKind::kScalarList:
      return read_counted(reader, argument);
  }
  return false;
}

bool read_call(KeyReader& reader, DecodedCall* call) {
  if (!read_state(reader, &call->state)) return false;
  while (!reader.at_end()) {
    if (!read_argument(reader, &call->arguments.emplace_back())) return false;
  }
  return true;
}

void put_words(const std::vector<Word>& words, KeyBuffer* buffer) {
  for (const Word word : words) buffer->put_word(word);
}

bool put_argument(const DecodedArgument& argument, KeyBuffer* buffer);

bool put_elements(const std::vector<DecodedArgument>& elements, KeyBuffer* buffer) {
  for (const DecodedArgument& element : elements) {
    if (!put_argument(element, buffer)) return false;
  }
  return true;
}

bool put_list(const DecodedArgument& argument, KeyBuffer* buffer) {
  switch (argument.kind) {
    case ArgumentKind::kTensorList:
      buffer->put_tensor_list(argument.elements.size());
      return put_elements(argument.elements, buffer);
    case ArgumentKind::kScalarList:
      buffer->put_scalar_list(argument.elements.size());
      return put_elements(argument.elements, buffer);
    case ArgumentKind::kIntList:
      buffer->put_int_list_header(argument.payload.size());
      break;
    case ArgumentKind::kFloatList:
      buffer->put_float_list_header(argument.payload.size());
      break;
    case ArgumentKind::kBoolList:
      buffer->put_bool_list_header(argument.payload.size());
      break;
    default:
      return false;
  }
  put_words(argument.payload, buffer);
  return true;
}

std::size_t scalar_payload(ArgumentKind kind) noexcept {
  return kind == ArgumentKind::kComplex ? 2 : 1;
}

bool put_scalar(const DecodedArgument& argument, KeyBuffer* buffer) {
  if (argument.payload.size() != scalar_payload(argument.kind)) return false;
  const Word first = argument.payload[0];
  const std::int64_t number = static_cast<std::int64_t>(first);
  switch (argument.kind) {
    case ArgumentKind::kInt:
      buffer->put_int(number);
      return true;
    case ArgumentKind::kFloat:
      buffer->put_float(std::bit_cast<double>(first));
      return true;
    case ArgumentKind::kBool:
      buffer->put_bool(first != 0);
      return true;
    case ArgumentKind::kComplex:
      buffer->put_complex(std::bit_cast<double>(first), std::bit_cast<double>(argument.payload[1]));
      return true;
    case ArgumentKind::kScalarType:
      buffer->put_scalar_type(number);
      return true;
    case ArgumentKind::kLayout:
      buffer->put_layout(number);
      return true;
    case ArgumentKind::kMemoryFormat:
      buffer->put_memory_format(number);
      return true;
    case ArgumentKind::kDevice: {
      const NamedDevice device = named_device(argument);
      buffer->put_device(device.type, device.index);
      return true;
    }
    default:
      return false;
  }
}

bool put_argument(const DecodedArgument& argument, KeyBuffer* buffer) {
  switch (argument.kind) {
    case ArgumentKind::kNone:
      buffer->put_none();
      return true;
    case ArgumentKind::kUndefinedTensor:
      buffer->put_undefined_tensor();
      return true;
    case ArgumentKind::kTensor:
      if (argument.sizes.size() != argument.tensor.dim ||
          argument.strides.size() != argument.tensor.dim) {
        return false;
      }
      buffer->put_tensor(argument.tensor, argument.sizes.data(), argument.strides.data());
      return true;
    case ArgumentKind::kString:
      buffer->put_string(argument.text);
      return true;
    case ArgumentKind::kTensorList:
    case ArgumentKind::kScalarList:
    case ArgumentKind::kIntList:
    case ArgumentKind::kFloatList:
    case ArgumentKind::kBoolList:
      return put_list(argument, buffer);
    default:
      return put_scalar(argument, buffer);
  }
}

}  // namespace

bool KeyBuffer::grow(std::size_t count) noexcept {
  if (room_ == kCapacity || count > kCapacity - size_) {
    return false;
  }
  long_.reset(new (std::nothrow) Word[kCapacity]);
  if (!long_) {
    return false;
  }
  std::copy_n(inline_, size_, long_.get());
  words_ = long_.get();
  room_ = kCapacity;
  return true;
}

NamedDevice named_device(const DecodedArgument& argument) {
  const Word word = argument.payload.at(0);
  return {static_cast<std::uint8_t>(read_field<KeyField::kDeviceType>(word)),
          unbiased_index(read_field<KeyField::kDeviceIndex>(word))};
}

bool decode_call(std::span<const Word> words, DecodedCall* call) {
  *call = {};
  if (words.size() > KeyBuffer::kCapacity) return false;
  KeyReader reader(words);
  if (read_call(reader, call)) return true;
  *call = {};
  return false;
}

bool encode_call(const DecodedCall& call, KeyBuffer* buffer) {
  buffer->clear();
  buffer->put_state(call.state);
  for (const DecodedArgument& argument : call.arguments) {
    if (!put_argument(argument, buffer)) return false;
  }
  if (buffer->overflowed()) return false;
  // A call with values where its kind has none, or out of range, is no call: it would not survive.
  DecodedCall back;
  return decode_call(buffer->words(), &back) && back == call;
}

std::vector<Word> persistent_words(std::span<const Word> words) {
  std::vector<KeyWord> classes;
  classes.reserve(words.size());
  KeyReader reader(words);
  reader.record_classes(&classes);
  DecodedCall call;
  if (!read_call(reader, &call)) return {};
  std::vector<Word> masked(words.begin(), words.end());
  for (std::size_t i = 0; i < masked.size(); ++i) masked[i] &= persistent_bits(classes[i]);
  return masked;
}

}  // namespace eagercache
