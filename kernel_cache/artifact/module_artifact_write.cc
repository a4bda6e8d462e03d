// The header's text, and writing an artifact.
#include <algorithm>
#include <fstream>
#include <iterator>
#include <utility>

#include "kernel_cache/artifact/module_artifact.h"
#include "kernel_cache/base/byte_fields.h"
#include "kernel_cache/base/guarded.h"
#include "kernel_cache/files/whole_file.h"

namespace eagercache {
namespace {

void put_section(const ArtifactSection& section, std::string* out) {
  put_number(section.offset, out);
  put_number(section.bytes, out);
  put_bytes(section.digest.bytes, out);
}

bool take_section(FieldReader& reader, ArtifactSection* section) {
  return reader.number(&section->offset) && reader.number(&section->bytes) &&
         reader.bytes(&section->digest.bytes);
}

void put_texts(const std::vector<std::string>& texts, std::string* out) {
  put_number(texts.size(), out);
  for (const std::string& text : texts) {
    put_text(text, out);
  }
}

bool take_texts(FieldReader& reader, std::vector<std::string>* texts) {
  std::uint64_t count = 0;
  if (!reader.count(8, &count)) return false;
  for (std::uint64_t i = 0; i < count; ++i) {
    std::string_view text;
    if (!reader.text(&text)) return false;
    texts->emplace_back(text);
  }
  return true;
}

void put_numbers(const std::vector<std::uint64_t>& numbers, std::string* out) {
  put_number(numbers.size(), out);
  for (const std::uint64_t number : numbers) {
    put_number(number, out);
  }
}

bool take_numbers(FieldReader& reader, std::vector<std::uint64_t>* numbers) {
  std::uint64_t count = 0;
  if (!reader.count(8, &count)) return false;
  numbers->resize(static_cast<std::size_t>(count));
  return std::ranges::all_of(*numbers,
                             [&](std::uint64_t& number) { return reader.number(&number); });
}

bool take_constant(FieldReader& reader, ArtifactConstant* constant) {
  std::uint64_t kind = 0;
  std::string_view dtype;
  if (!take_texts(reader, &constant->names) || !reader.number(&kind) || !reader.text(&dtype) ||
      !take_numbers(reader, &constant->sizes) || !take_numbers(reader, &constant->strides) ||
      !take_section(reader, &constant->data) || kind > 2) {
    return false;
  }
  constant->kind = static_cast<ArtifactConstant::Kind>(kind);
  constant->dtype = dtype;
  return true;
}

bool take_facts(FieldReader& reader, std::map<std::string, std::string>* facts) {
  std::uint64_t count = 0;
  if (!reader.count(16, &count)) return false;
  for (std::uint64_t i = 0; i < count; ++i) {
    std::string_view name;
    std::string_view value;
    if (!reader.text(&name) || !reader.text(&value)) return false;
    if (!facts->emplace(name, value).second) return false;
  }
  return true;
}

std::uint64_t aligned(std::uint64_t offset, std::uint64_t alignment) {
  return (offset + alignment - 1) / alignment * alignment;
}

Status pad_to(WholeFile& file, std::uint64_t offset) {
  return file.write(std::string(static_cast<std::size_t>(offset - file.written()), '\0'));
}

// Says where everything lies. The header's length does not depend on what these numbers are.
void lay_out(ArtifactHeader* header) {
  std::uint64_t end = kArtifactHead + encode_artifact_header(*header).size();
  for (ArtifactSection& library : header->libraries) {
    library.offset = aligned(end, kConstantAlignment);
    end = library.offset + library.bytes;
  }
  header->weights_offset = end = aligned(end, kArtifactPage);
  for (ArtifactConstant& constant : header->constants) {
    constant.data.offset = aligned(end, kConstantAlignment);
    end = constant.data.offset + constant.data.bytes;
  }
  header->file_bytes = end;
}

Result<std::vector<std::string>> read_libraries(const std::vector<std::filesystem::path>& paths) {
  std::vector<std::string> libraries;
  for (const std::filesystem::path& path : paths) {
    std::ifstream file(path, std::ios::binary);
    libraries.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    if (!file || libraries.back().empty()) {
      return Status(StatusCode::kIoError, path.string() + " cannot be read");
    }
  }
  return libraries;
}

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Status write_sections(WholeFile& file, const ArtifactHeader& header,
                      const std::vector<std::string>& libraries,
                      const std::vector<std::span<const std::byte>>& data) {
  Status status;
  const auto write = [&](const ArtifactSection& section, std::string_view bytes) {
    if (status) status = pad_to(file, section.offset);
    if (status) status = file.write(bytes);
  };
  for (std::size_t i = 0; i < libraries.size(); ++i) {
    write(header.libraries[i], libraries[i]);
  }
  for (std::size_t i = 0; i < data.size(); ++i) {
    write(header.constants[i].data, text_of(data[i]));
  }
  return status ? pad_to(file, header.file_bytes) : status;
}

Result<std::uint64_t> write_artifact(const std::filesystem::path& path, ArtifactContents contents,
                                     const SigningKey& key) {
  if (contents.constants.size() != contents.data.size()) {
    return Status(StatusCode::kInvalidArgument, "not one piece of data for each constant");
  }
  Result<std::vector<std::string>> libraries = read_libraries(contents.libraries);
  if (!libraries) {
    return libraries.status();
  }
  const Result<Validity> validity = validity_to_sign(contents.validity);
  if (!validity) {
    return validity.status();
  }
  ArtifactHeader header;
  header.validity = validity.value();
  header.environment = std::move(contents.environment);
  header.cpu_features = std::move(contents.cpu_features);
  header.facts = std::move(contents.facts);
  header.constants = std::move(contents.constants);
  for (const std::string& library : libraries.value()) {
    header.libraries.push_back({0, library.size(), sha256(library)});
  }
  for (std::size_t i = 0; i < contents.data.size(); ++i) {
    header.constants[i].data = {0, contents.data[i].size(), sha256(contents.data[i])};
  }
  lay_out(&header);
  const std::string text = encode_artifact_header(header);
  if (text.size() > kMaxArtifactHeader) {
    return Status(StatusCode::kFull, "the artifact's header would be larger than one may be");
  }
  const Result<Signature> signature = key.sign(digest_message(kArtifactDomain, text));
  if (!signature) {
    return signature.status();
  }
  std::string head(kArtifactFirstLine);
  put_bytes(key.public_key().bytes, &head);
  put_bytes(signature.value().bytes, &head);
  put_text(text, &head);
  Result<WholeFile> file = WholeFile::create(path);
  if (!file) {
    return file.status();
  }
  Status status = file->write(head);
  if (status) status = write_sections(file.value(), header, libraries.value(), contents.data);
  if (status) status = file->publish();
  if (!status) {
    return status;
  }
  return header.file_bytes;
}

}  // namespace

std::string encode_artifact_header(const ArtifactHeader& header) {
  std::string text;
  put_validity(header.validity, &text);
  put_text(header.environment, &text);
  put_texts(header.cpu_features, &text);
  put_number(header.facts.size(), &text);
  for (const auto& [name, value] : header.facts) {
    put_text(name, &text);
    put_text(value, &text);
  }
  put_number(header.libraries.size(), &text);
  for (const ArtifactSection& library : header.libraries) {
    put_section(library, &text);
  }
  put_number(header.constants.size(), &text);
  for (const ArtifactConstant& constant : header.constants) {
    put_texts(constant.names, &text);
    put_number(static_cast<std::uint64_t>(constant.kind), &text);
    put_text(constant.dtype, &text);
    put_numbers(constant.sizes, &text);
    put_numbers(constant.strides, &text);
    put_section(constant.data, &text);
  }
  put_number(header.weights_offset, &text);
  put_number(header.file_bytes, &text);
  return text;
}

bool decode_artifact_header(std::string_view text, ArtifactHeader* header) {
  FieldReader reader(text);
  std::string_view environment;
  std::uint64_t count = 0;
  if (!take_validity(reader, &header->validity) || !reader.text(&environment) ||
      !take_texts(reader, &header->cpu_features) || !take_facts(reader, &header->facts) ||
      !reader.count(48, &count)) {
    return false;
  }
  header->environment = environment;
  header->libraries.resize(static_cast<std::size_t>(count));
  for (ArtifactSection& library : header->libraries) {
    if (!take_section(reader, &library)) return false;
  }
  if (!reader.count(88, &count)) return false;
  header->constants.resize(static_cast<std::size_t>(count));
  for (ArtifactConstant& constant : header->constants) {
    if (!take_constant(reader, &constant)) return false;
  }
  return reader.number(&header->weights_offset) && reader.number(&header->file_bytes) &&
         reader.at_end();
}

Result<std::uint64_t> write_module_artifact(const std::filesystem::path& path,
                                            ArtifactContents contents, const SigningKey& key) {
  return guarded([&] { return write_artifact(path, std::move(contents), key); });
}

}  // namespace eagercache
