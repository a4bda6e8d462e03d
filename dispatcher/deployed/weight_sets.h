#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "dispatcher/base/locks.h"
#include "dispatcher/deployed/program_spec.h"
#include "dispatcher/deployed/weight_set.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// The constants of a deployed module: those that answer, and a second version that is being made
// ready. Thread-safe. Whoever asks for the active set waits for a pointer to be copied, never for
// an update, whose work is done before anybody sees it: on a GPU on a stream of its own, for which
// the updating thread waits.
class WeightSets {
 public:
  enum class Which { kActive, kInactive };
  struct Update {
    Which which = Which::kActive;
    bool whole = false;  // every constant must be given
    // The tensors themselves are used, not copies: whoever gives them does not write them while
    // they may be read, or calls fold() and accepts that answers may mix what he wrote.
    bool keep = false;
  };
  // Fills the folded rows of a set out of the others.
  using Folder = std::function<Status(std::vector<at::Tensor>* values)>;

  // All values are on `device`. `folder` may be empty where nothing is folded.
  WeightSets(std::vector<ConstantForm> forms, const ProgramSpec& spec, c10::Device device,
             Folder folder);

  // The first version; folded rows that are undefined are computed. Values on a GPU that are
  // elsewhere now are copied there; the others are kept. Before anything else.
  Status start(std::vector<at::Tensor> values);

  WeightSetPtr active() const;

  // Makes a new version of the set with these values in the place of its own; the inactive set, if
  // there is none yet, begins as the active one. Nothing changes unless all of it is right:
  // kInvalidArgument names the constant that is not known, is folded, or has another dtype or other
  // sizes, or an index that is out of range. Other strides are copied into the constant's own, and
  // tensors of the CPU or another GPU to the constants' GPU. The active set is folded before it
  // answers, the inactive one before it is swapped in. kUnsupported, as of the next two, while the
  // thread's stream is captured into a graph.
  Status update(const std::map<std::string, at::Tensor>& values, const Update& how);
  // The inactive set answers from now on, and the active one is the inactive. kNotFound when there
  // is none.
  Status swap();
  // Computes the folded constants anew. Needed for nothing but constants that were kept.
  Status fold(Which which);
  // Lets go of the inactive set's memory, once the last call that uses it has ended.
  void drop_inactive();

  // Copies of a set's constants, by each of their names, made on the thread's current stream.
  // kNotFound without an inactive set.
  Result<std::map<std::string, at::Tensor>> values(Which which, bool folded) const;
  // The inactive set's version; 0 without one.
  std::uint64_t inactive_version() const;

  const std::vector<ConstantForm>& forms() const noexcept { return forms_; }

 private:
  struct Slot {
    WeightSetPtr set;
    bool folded = true;  // the folded rows are those of the others
  };

  Status check_writable() const;
  Result<Slot> slot(Which which) const;
  Status replace(std::vector<at::Tensor>* values, const std::map<std::string, at::Tensor>& given,
                 const Update& how, bool* folds) const;
  Result<at::Tensor> accepted(const ConstantForm& form, const std::string& name,
                              const at::Tensor& value, bool keep) const;
  Status check_ranges(const std::vector<at::Tensor>& values) const;
  Result<Slot> folded(Slot slot);

  const std::vector<ConstantForm> forms_;
  const std::vector<ProgramSpec::IndexRange> ranges_;
  const c10::Device device_;
  const std::optional<c10::Stream> stream_;  // of updates; none on the CPU
  const Folder folder_;
  std::vector<bool> is_fold_input_;  // whether a row is read by the folder
  std::map<std::string, std::size_t> rows_;

  // Held through a whole update, swap or fold; taken before pointers_mutex_.
  Mutex writers_mutex_;
  std::uint64_t next_version_ EAGERCACHE_GUARDED_BY(writers_mutex_) = 1;

  mutable Mutex pointers_mutex_;  // held for a copy of what it guards
  Slot active_ EAGERCACHE_GUARDED_BY(pointers_mutex_);
  Slot inactive_ EAGERCACHE_GUARDED_BY(pointers_mutex_);
};

}  // namespace eagercache
