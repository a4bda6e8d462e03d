// Writes the seeds of the fuzz targets: make_fuzz_corpus DIRECTORY
#include <array>
#include <filesystem>
#include <iostream>
#include <span>
#include <string>

#include "guards/key/call_key.h"
#include "kernel_cache/format/file_names.h"
#include "kernel_cache/format/manifest.h"
#include "tests/kernel_cache/test_objects.h"

namespace eagercache {
namespace {

void make_corpus(const std::filesystem::path& top) {
  for (const char* folder : {"manifest", "elf", "names", "key"}) {
    std::filesystem::create_directories(top / folder);
  }
  Manifest kernel;
  kernel.key = sha256("key");
  kernel.kind = EntryKind::kKernel;
  kernel.objects = {{ObjectKind::kSharedObject, sha256("a"), 1}, {ObjectKind::kCubin, {}, 2}};
  kernel.cpu_features = {"avx2"};
  kernel.facts = {{"op", "aten::add"}, {"reason", "a\nb\\"}};
  Manifest failed;
  failed.kind = EntryKind::kFailed;
  failed.failure = FailureClass::kTransient;
  failed.retry_after = 1;
  int number = 0;
  for (const Manifest& manifest : {kernel, failed, Manifest{}}) {
    const std::string text = encode_manifest(manifest).value();
    const std::string name = std::to_string(number++);
    write_bytes(top / "manifest" / name, text);
    write_bytes(top / "manifest" / (name + ".body"), text.substr(0, text.rfind("digest ")));
  }
  for (const char* object : {"object_answer", "object_static_tls", "object_needs_math",
                             "object_runpath", "object_needs_stranger"}) {
    write_bytes(top / "elf" / object, read_bytes(test_object(object)));
  }
  // A tensor, an integer, a list of tensors and a text.
  KeyBuffer call;
  const std::array<std::int64_t, 2> sizes{8, 4};
  const std::array<std::int64_t, 2> strides{4, 1};
  call.clear();
  call.put_state({});
  call.put_tensor({.dtype = 6, .dim = 2}, sizes.data(), strides.data());
  call.put_int(-1);
  call.put_int_list(sizes.data(), sizes.size());
  call.put_string("text");
  const auto words = std::as_bytes(call.words());
  write_bytes(top / "key" / "call", {reinterpret_cast<const char*>(words.data()), words.size()});
  const std::string environment = environment_id_of("environment");
  for (const std::string& name :
       {environment, manifest_file(environment, kernel.key), failure_file(environment, kernel.key),
        object_file(ObjectKind::kCubin, kernel.key), lock_file(kernel.key),
        temporary_file(new_temporary_name(true)), quarantine_file(1, "leaf")}) {
    write_bytes(top / "names" / std::to_string(number++), name);
  }
}

}  // namespace
}  // namespace eagercache

int main(int count, char** words) {
  if (count != 2) {
    std::cerr << "usage: make_fuzz_corpus DIRECTORY\n";
    return 2;
  }
  eagercache::make_corpus(words[1]);
  return 0;
}
