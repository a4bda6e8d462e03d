// Runtime: from an entry of the store to a kernel in this process. What the entry says of its
// object is compared with what the object says of itself, and with the call, before anything of it
// runs.

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dispatcher/base/log.h"
#include "dispatcher/kernels/kernel_forms.h"
#include "dispatcher/plans/contract.h"
#include "dispatcher/runtime/runtime.h"

namespace eagercache {
namespace {

// A kernel, and what its object says it was made for (contract.h); of cubins a line for each.
struct Opened {
  std::unique_ptr<LoadedKernel> kernel;
  std::string made_for;
};

// kCorrupt unless the objects, which say `text`, were made for the entry.
Status check_made_for(const Manifest& manifest, const KernelForm& form, std::string_view text) {
  if (manifest.objects.front().kind != ObjectKind::kCubin) {
    return check_contract(text, contract_of(manifest.key, form, manifest.cpu_features));
  }
  for (std::size_t i = 0; i < manifest.objects.size(); ++i) {
    KernelForm part = form;
    part.form += ' ' + std::to_string(i);
    const std::string_view line =
        text.substr(std::min(i * kContractLine, text.size()), kContractLine);
    const Digest contract = contract_of(manifest.key, part, manifest.cpu_features);
    if (Status status = check_contract(line, contract); !status) {
      return status;
    }
  }
  return Status::ok();
}

// `status`; an entry whose facts are malformed, or not what its object was made for, is put aside.
Status checked(DiskStore& files, const Manifest& manifest, Status status) {
  if (status.code() == StatusCode::kCorrupt) {
    if (Status moved = files.quarantine(manifest.key, status.message()); !moved) {
      log_line(LogLevel::kWarning, moved.to_string());
    }
  }
  return status;
}

Result<Opened> load_library(DiskStore& files, const Manifest& manifest, c10::Device device,
                            const KernelForm& form) {
  if (device.is_cuda() && form.form != "container") {
    return Status(StatusCode::kIncompatible,
                  "entries of form '" + form.form + "' with a library do not run on CUDA");
  }
  if (Status status = check_form(form.form); !status) {
    return status;
  }
  Result<std::filesystem::path> path = files.verified_shared_object(manifest, 0);
  if (!path) {
    return path.status();
  }
  Result<SharedLibrary> library = SharedLibrary::open(path.value());
  if (!library) {
    return library.status();
  }
  std::string text = made_for(library->symbol(kMadeForSymbol));
  if (Status status = checked(files, manifest, check_made_for(manifest, form, text)); !status) {
    return status;
  }
  Result<std::unique_ptr<LoadedKernel>> kernel = make_kernel(library.value(), device, form);
  if (!kernel) {
    return checked(files, manifest, kernel.status());
  }
  return Opened{std::move(kernel).value(), std::move(text)};
}

Result<Opened> load_cubins(DiskStore& files, const Manifest& manifest, c10::Device device,
                           const KernelForm& form) {
  std::vector<std::string> objects;
  std::string text;
  for (std::size_t i = 0; i < manifest.objects.size(); ++i) {
    if (manifest.objects[i].kind != ObjectKind::kCubin) {
      return Status(StatusCode::kIncompatible, "an object of a CUDA kernel is no cubin");
    }
    Result<std::string> bytes = files.read_object(manifest, i);
    if (!bytes) {
      return bytes.status();
    }
    const std::string line = cubin_made_for(bytes.value());
    text += line.empty() ? std::string(kContractLine, '\n') : line;
    objects.push_back(std::move(bytes).value());
  }
  if (Status status = checked(files, manifest, check_made_for(manifest, form, text)); !status) {
    return status;
  }
  Result<std::unique_ptr<LoadedKernel>> kernel = make_cuda_kernel(objects, device, form);
  if (!kernel) {
    return checked(files, manifest, kernel.status());
  }
  return Opened{std::move(kernel).value(), std::move(text)};
}

std::size_t count_tensors(const std::vector<DecodedArgument>& arguments) {
  std::size_t count = 0;
  for (const DecodedArgument& argument : arguments) {
    count += argument.kind == ArgumentKind::kTensor ? 1 : count_tensors(argument.elements);
  }
  return count;
}

Status check_fit(const OperatorHook& hook, std::span<const Word> words,
                 const LoadedKernel& kernel) {
  DecodedCall call;
  if (!decode_call(words, &call) || kernel.num_inputs() != count_tensors(call.arguments) ||
      !hook.takes_outputs(kernel.num_outputs())) {
    return {StatusCode::kIncompatible, "the kernel takes or returns another number of tensors"};
  }
  if (kernel.writes_inputs() != hook.writes_in(call)) {
    return {StatusCode::kIncompatible, "the kernel does not write what the operator writes"};
  }
  return Status::ok();
}

// Says in the store, as long as it lives, that this process is at what may kill it.
class Attempt {
 public:
  Attempt(DiskStore& store, const Digest& key) : store_(store), key_(key) {
    store_.note_attempt(key_, true);
  }
  ~Attempt() { store_.note_attempt(key_, false); }
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

 private:
  DiskStore& store_;
  const Digest key_;
};

}  // namespace

Result<LoadedKernel*> Runtime::load_kernel(OperatorHook& hook, std::span<const Word> words,
                                           const Manifest& manifest) {
  if (manifest.objects.empty()) {
    return Status(StatusCode::kIncompatible, "the entry has no object");
  }
  const c10::Device device = hook.device_of(words);
  const KernelForm form{manifest.fact("form"), manifest.fact("launch_plan"),
                        manifest.fact("output_strides")};
  const std::string identity = kernel_identity(manifest.objects, device, form);
  const std::shared_ptr<DiskStore> files = store();
  if (const std::optional<Loaded> known = find_loaded(identity)) {
    // Another entry's, as far as is known: what its object says may not hold for this one.
    Status status = checked(*files, manifest, check_made_for(manifest, form, known->made_for));
    if (!status) return status;
    if (status = check_fit(hook, words, *known->kernel); !status) return status;
    return known->kernel;
  }
  if (Status status = files->check_attempts(manifest.key); !status) {
    return status;
  }
  log_event(LogLevel::kDebug, "load",
            {{"op", hook.full_name()}, {"object", manifest.objects.front().digest.hex()}});
  const Attempt loading(*files, manifest.key);
  Result<Opened> opened = manifest.objects.front().kind == ObjectKind::kCubin
                              ? load_cubins(*files, manifest, device, form)
                              : load_library(*files, manifest, device, form);
  if (!opened) {
    return opened.status();
  }
  opened->kernel->watch_first_run(
      [files, key = manifest.key](bool begins) { files->note_attempt(key, begins); });
  opened->kernel->name_events(manifest.key.hex());
  if (Status status = check_fit(hook, words, *opened->kernel); !status) {
    return status;
  }
  const Lock lock(registry_mutex_);
  // Two threads may have loaded the same object; the first one stays, the other is leaked like
  // every kernel (its library is the same one).
  auto [slot, inserted] = loaded_.try_emplace(identity);
  if (inserted) {
    slot->second = {opened->kernel.release(), std::move(opened->made_for)};
  }
  return slot->second.kernel;
}

std::optional<Runtime::Loaded> Runtime::find_loaded(const std::string& identity) const {
  const Lock lock(registry_mutex_);
  const auto found = loaded_.find(identity);
  return found == loaded_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace eagercache
