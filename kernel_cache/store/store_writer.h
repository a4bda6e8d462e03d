#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "kernel_cache/format/file_names.h"
#include "kernel_cache/store/store_tree.h"

namespace eagercache {

// A complete file in the store's temporary folder: written, flushed, read-only. Removed when it
// goes out of scope; what was linked from it stays.
class TemporaryFile {
 public:
  TemporaryFile(std::shared_ptr<const TreeHandle> tree, FileLayer& files, std::string name)
      : tree_(std::move(tree)), files_(&files), name_(std::move(name)) {}
  TemporaryFile(TemporaryFile&& other) noexcept
      : tree_(std::move(other.tree_)), files_(other.files_), name_(std::move(other.name_)) {}
  TemporaryFile& operator=(TemporaryFile&&) = delete;
  ~TemporaryFile() {
    // A temporary that cannot be removed now is removed by the next clean-up.
    if (tree_ != nullptr) files_->unlink(tree_->directory(), name_.c_str(), false);
  }

  const char* name() const noexcept { return name_.c_str(); }

 private:
  std::shared_ptr<const TreeHandle> tree_;
  FileLayer* files_;
  std::string name_;
};

enum class Committed { kNew, kAlreadyThere };

// The writing half of one store directory. Every change is either a new file under a new name (one
// link), or the removal or replacement of a whole file (one rename or unlink). Thread-safe.
class StoreWriter {
 public:
  // Both outlive the writer. `environment_text` is written beside the entries.
  StoreWriter(StoreTree& tree, std::string environment_text)
      : tree_(tree), environment_text_(std::move(environment_text)) {}

  // Makes what is missing of the layout, also after somebody deleted the store or a part of it.
  // Where every folder is there, that is all that is looked at; with `thorough`, all is checked.
  Status ensure_layout(bool thorough);

  Result<TemporaryFile> write_temporary(std::string_view bytes);
  // Gives the temporary's content the name `name`, unless that exists. Makes the fan-out directory.
  Result<Committed> commit(const TemporaryFile& temporary, const std::string& name);
  // As commit, but what has the name already is replaced.
  Status replace(const TemporaryFile& temporary, const std::string& name);
  // Flushes the directory that holds `name`. Nothing depends on its success.
  void sync_parent(const std::string& name);

  // Moves the file, whatever it is, out of the way. kNotFound when there is none.
  Status quarantine(const std::string& name);
  // Removes what quarantine keeps beyond 64 files or 7 days. Returns how many.
  std::uint64_t trim_quarantine();
  // Removes a file or a whole directory. False when something of it remains.
  bool remove_tree(const std::string& name);

 private:
  Status make_layout();
  Status write_environment();
  Status write_format(int root_directory);

  StoreTree& tree_;
  const std::string environment_text_;
};

}  // namespace eagercache
