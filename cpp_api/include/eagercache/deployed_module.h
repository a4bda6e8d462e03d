#pragma once

// Modules with their weights, deployed: one signed file that Python wrote
// (`eagercache bundle export --with-weights`, `eagercache.export_module`) answers calls of a
// LibTorch program, without a Python interpreter, a compiler or the module.
//
//     eagercache::LoadOptions options;
//     options.trusted_keys = {"release.pub"};
//     const auto loaded = eagercache::DeployedModule::load("model.artifact", options);
//     if (!loaded) throw std::runtime_error(loaded.reason);
//     const auto answer = loaded.module.run({at::rand({4, 64})});
//     if (!answer) throw std::runtime_error(answer.reason);
//     use(answer.outputs[0]);
//
// No function throws, but for std::bad_alloc and what ATen throws without memory. All may be called
// from any thread, on one module or on several. Independent of enable().

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "eagercache/eagercache.h"

namespace eagercache {

class DeployedProgram;  // ours

// How an artifact is opened. Nothing is loaded of a file that no trusted key has signed.
struct LoadOptions {
  // Ed25519 public keys (PEM), one of which must have signed the artifact.
  std::vector<std::filesystem::path> trusted_keys;
  // A list of keys and artifacts that are not to be used any more, one a line (64 hexadecimal
  // digits); EAGERCACHE_REVOKED when empty. A list that cannot be read refuses everything.
  std::filesystem::path revoked;
  // Map the weights: they cost no time now and no memory of this process alone, and all processes
  // that map the file share its pages. The file must belong to root or this user and be writable by
  // nobody else (EAGERCACHE_ALLOW_UNTRUSTED=1 admits it), and must not be written while it is used;
  // a new file may take its name. False: they are read into memory and compared with their digests.
  bool map_weights = true;
  // With map_weights: read and compare all of them first. The header and the code always are.
  bool verify_weights = false;
  // How many calls of run() and try_run() may run at a time; 0: as many as there are processors.
  std::size_t runners = 0;
  // Of a module that was exported on a GPU: the GPU that it runs on, which must be of the same kind
  // ("cuda:1"); where none is named, the thread's current one. One that was exported on the CPU
  // runs there.
  std::optional<at::Device> device;
};

// How something ended: `reason` is one line and empty when it went well; `code` is "refused",
// "corrupt", "incompatible", "invalid_argument", "not_found", "busy", "unsupported" or another name
// of what may be wrong with files.
struct DeployStatus {
  std::string reason;
  std::string code;

  explicit operator bool() const noexcept { return code.empty(); }
};

// What a call gave; without outputs where it failed.
struct RunResult : DeployStatus {
  std::vector<at::Tensor> outputs;
  // Of the constants that all of the answer was computed with.
  std::uint64_t version = 0;
};

// Constants by their names, as tensors of the caller's.
struct ConstantValues : DeployStatus {
  std::map<std::string, at::Tensor> values;
};

// One input or output of the module, as it was compiled.
struct TensorDescription {
  std::string name;
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::vector<std::int64_t> sizes;  // of an input: -1 where any size is taken that was compiled for
};

// One parameter or buffer, or what is computed of them once instead of in every call.
struct ConstantDescription {
  std::string name;  // as in the module's state_dict()
  std::vector<std::string> aliases;
  std::string kind;  // "parameter", "buffer", or "folded": computed from others, and never given
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
};

// Which constants: those that answer, or a second set that is changed at leisure and swapped in.
enum class ConstantSet { kActive, kInactive };

// How new values take the place of constants.
struct UpdateOptions {
  ConstantSet set = ConstantSet::kActive;
  bool whole = false;  // every constant must be given
  // False: the tensors themselves are used, and must not be written while they are.
  bool copy = true;
};

// A module with its weights. Copies are the same module; the last one lets go of the weights, once
// the last call has ended. Calls are computed without gradients, each with one whole version of the
// constants. No call waits for an update, a swap or a fold: those make a new version beside the
// old one. On a GPU a call has ended when its work is given to the thread's current stream; updates
// have a stream of their own, and their thread waits until it is done. There nothing of this may be
// called while the current stream is captured into a graph, and an input with an index that is out
// of range ends in an error of the device, as without us.
class EAGERCACHE_API DeployedModule {
 public:
  struct Loaded;

  // The signature, the header, the code, and that this process is what the code was made for, are
  // checked before anything is loaded.
  static Loaded load(const std::filesystem::path& artifact, const LoadOptions& options);

  // A module that is none; only to be assigned to, copied, and asked with `operator bool`. Every
  // other function of it gives nothing, or says "not_found".
  DeployedModule() = default;
  explicit operator bool() const noexcept { return program_ != nullptr; }

  // The outputs for inputs in the order of inputs(): tensors on device() of those dtypes and sizes;
  // other strides are copied. Waits for a free runner.
  RunResult run(const std::vector<at::Tensor>& inputs) const;
  // The same, but "busy" where no runner is free.
  RunResult try_run(const std::vector<at::Tensor>& inputs) const;
  // The same without a runner: for callers that limit their calls themselves.
  RunResult run_single_threaded(const std::vector<at::Tensor>& inputs) const;

  at::Device device() const;  // the CPU for a module that is none
  std::vector<TensorDescription> inputs() const;
  std::vector<TensorDescription> outputs() const;
  std::vector<std::string> input_names() const;
  std::vector<std::string> output_names() const;
  // How Python's (args, kwargs) and answer are made of the tensors, as JSON.
  std::string input_spec() const;
  std::string output_spec() const;
  std::vector<ConstantDescription> constants() const;  // the folded ones last
  // What the export wrote down: "module", "numerics", "threads", "torch" and others.
  std::map<std::string, std::string> facts() const;
  std::string signer() const;  // a public key in hexadecimal digits

  // Copies of the constants but for folded ones, under each of their names, on device().
  ConstantValues constant_values(ConstantSet set = ConstantSet::kActive) const;
  // Gives constants other values, all of them at once or, on an error, none. Dtypes and sizes must
  // be the constants' own. The inactive set begins as a copy of the active one. Folded constants
  // are computed anew: of the active set before it answers, of the inactive one before it is
  // swapped in.
  DeployStatus update_constants(const std::map<std::string, at::Tensor>& values,
                                const UpdateOptions& options = {}) const;
  // The inactive set answers from now on; the other becomes the inactive one.
  DeployStatus swap_constants() const;
  // Computes folded constants anew. Updates do so by themselves: for tensors that were given with
  // copy = false and written since, and to have the work done before a swap.
  DeployStatus fold_constants(ConstantSet set = ConstantSet::kActive) const;
  // Lets go of the inactive set's memory.
  void drop_inactive_constants() const;
  // Numbers of the sets' versions: 1 is the artifact's own, and none comes twice; 0 without a set.
  std::uint64_t version(ConstantSet set = ConstantSet::kActive) const;

  std::size_t runners() const;
  // Whether run() would begin at once.
  bool is_ready() const;
  // Wait for up to `seconds` until a runner is free, or until no call is under way; whether it is
  // so.
  bool wait_until_ready(double seconds) const;
  bool wait_until_idle(double seconds) const;

 private:
  RunResult run_at(const std::vector<at::Tensor>& inputs, int place) const;

  std::shared_ptr<DeployedProgram> program_;
};

// The module; an empty one where the status says why there is none.
struct DeployedModule::Loaded : DeployStatus {
  DeployedModule module;
};

// What an artifact says of itself, once all of it was checked.
struct ArtifactCheck : DeployStatus {
  std::string signer;        // the key's id: 64 hexadecimal digits
  std::string digest;        // the artifact's, by which it can be revoked
  std::int64_t created = 0;  // seconds since 1970
  std::int64_t expires = 0;  // likewise; 0: never
  std::uint64_t bytes = 0;
};

// Reads and checks all of an artifact, every weight too, and that its code can run in this process.
// Loads and runs nothing of it. `revoked` as in LoadOptions.
EAGERCACHE_API ArtifactCheck check_artifact(const std::filesystem::path& artifact,
                                            const std::vector<std::filesystem::path>& trusted_keys,
                                            const std::filesystem::path& revoked = {});

}  // namespace eagercache
