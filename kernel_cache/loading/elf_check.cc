#include "kernel_cache/loading/elf_check.h"

#include <elf.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_cache/base/machine.h"

namespace eagercache {
namespace {

constexpr std::size_t kMaxSegments = 64;
constexpr std::size_t kMaxDynamicEntries = 4096;

Status unfit(const std::string& reason) {
  return {StatusCode::kIncompatible, "shared object: " + reason};
}

// A library's soname: `prefix`, then letters, digits and "_.-+" only when `open`, then `suffix`.
struct AllowedLibrary {
  std::string_view prefix;
  bool open;
  std::string_view suffix;
};

constexpr std::array kAllowedLibraries{
    AllowedLibrary{"libtorch", true, ".so"},    AllowedLibrary{"libc10", true, ".so"},
    AllowedLibrary{"libgomp", true, ".so.1"},   AllowedLibrary{"libstdc++.so.6", false, ""},
    AllowedLibrary{"libm.so.6", false, ""},     AllowedLibrary{"libc.so.6", false, ""},
    AllowedLibrary{"libgcc_s.so.1", false, ""}, AllowedLibrary{"libpthread.so.0", false, ""},
    AllowedLibrary{"libdl.so.2", false, ""},    AllowedLibrary{"librt.so.1", false, ""},
    AllowedLibrary{kElfLoader, false, ""},      AllowedLibrary{"libcuda.so.1", false, ""},
};

bool is_library_character(char c) noexcept {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '-' || c == '.' || c == '+';
}

bool is_allowed_library(std::string_view name) {
  return std::any_of(kAllowedLibraries.begin(), kAllowedLibraries.end(),
                     [name](const AllowedLibrary& allowed) {
                       if (!name.starts_with(allowed.prefix)) return false;
                       const std::string_view rest = name.substr(allowed.prefix.size());
                       if (!allowed.open) return rest.empty();
                       return rest.ends_with(allowed.suffix) &&
                              std::all_of(rest.begin(), rest.end(), is_library_character);
                     });
}

bool is_refused_tag(std::int64_t tag) noexcept {
  constexpr std::array<std::int64_t, 8> kRefused{DT_RPATH,    DT_RUNPATH, DT_TEXTREL,   DT_AUDIT,
                                                 DT_DEPAUDIT, DT_CONFIG,  DT_AUXILIARY, DT_FILTER};
  return std::find(kRefused.begin(), kRefused.end(), tag) != kRefused.end();
}

// What the dynamic section says, as far as it matters here.
struct DynamicSection {
  std::vector<std::uint64_t> needed;  // offsets into the string table
  std::optional<std::uint64_t> string_table;
  std::uint64_t string_table_size = 0;
};

class ElfChecker {
 public:
  explicit ElfChecker(std::span<const std::byte> image) : image_(image) {}

  Status run() {
    if (Status status = check_header(); !status) return status;
    if (Status status = check_segments(); !status) return status;
    DynamicSection section;
    if (Status status = read_dynamic(section); !status) return status;
    return check_needed(section);
  }

 private:
  bool inside(std::uint64_t offset, std::uint64_t size) const noexcept {
    return offset <= image_.size() && size <= image_.size() - offset;
  }

  // `offset` may be anything; the copy makes alignment irrelevant.
  template <typename Record>
  std::optional<Record> record_at(std::uint64_t offset) const noexcept {
    if (!inside(offset, sizeof(Record))) return std::nullopt;
    Record record;
    std::memcpy(&record, image_.data() + offset, sizeof record);
    return record;
  }

  Status check_header() {
    const auto header = record_at<Elf64_Ehdr>(0);
    if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return unfit("not ELF");
    if (header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_ident[EI_DATA] != ELFDATA2LSB ||
        header->e_ident[EI_VERSION] != EV_CURRENT || header->e_version != EV_CURRENT) {
      return unfit("not 64-bit little-endian ELF of version 1");
    }
    if (header->e_machine != kElfMachine) return unfit("for another machine");
    if (header->e_type != ET_DYN) return unfit("not a shared object (ET_DYN)");
    if (header->e_phentsize != sizeof(Elf64_Phdr) || header->e_phnum == 0 ||
        header->e_phnum > kMaxSegments) {
      return unfit("odd program headers");
    }
    for (std::uint64_t i = 0; i < header->e_phnum; ++i) {
      // e_phoff may be near 2^64; a wrapped sum is caught by the bounds check of the first one.
      const auto segment = inside(header->e_phoff, (i + 1) * sizeof(Elf64_Phdr))
                               ? record_at<Elf64_Phdr>(header->e_phoff + i * sizeof(Elf64_Phdr))
                               : std::nullopt;
      if (!segment) return unfit("program headers outside the file");
      segments_.push_back(*segment);
    }
    return Status::ok();
  }

  Status check_segments() {
    bool stack_seen = false;
    bool loads = false;
    for (const Elf64_Phdr& segment : segments_) {
      if (!inside(segment.p_offset, segment.p_filesz)) return unfit("segment outside the file");
      if (segment.p_type == PT_INTERP) return unfit("is a program");
      if (segment.p_type == PT_GNU_STACK) {
        stack_seen = true;
        if ((segment.p_flags & PF_X) != 0) return unfit("asks for an executable stack");
      }
      if (segment.p_type != PT_LOAD) continue;
      loads = true;
      if (segment.p_filesz > segment.p_memsz) return unfit("segment smaller than its content");
      if (segment.p_vaddr + segment.p_memsz < segment.p_vaddr) return unfit("segment wraps around");
      if ((segment.p_flags & PF_W) != 0 && (segment.p_flags & PF_X) != 0) {
        return unfit("segment both writable and executable");
      }
    }
    // Without the header the loader takes the stack to be executable.
    if (!stack_seen) return unfit("does not say that its stack is not executable");
    if (!loads) return unfit("nothing to load");
    return Status::ok();
  }

  // The file offset of `size` bytes at a virtual address, by the PT_LOAD that holds them.
  std::optional<std::uint64_t> offset_of(std::uint64_t address, std::uint64_t size) const noexcept {
    for (const Elf64_Phdr& segment : segments_) {
      if (segment.p_type != PT_LOAD || address < segment.p_vaddr) continue;
      const std::uint64_t distance = address - segment.p_vaddr;
      if (distance <= segment.p_filesz && size <= segment.p_filesz - distance) {
        return segment.p_offset + distance;
      }
    }
    return std::nullopt;
  }

  Status read_dynamic(DynamicSection& section) const {
    const auto is_dynamic = [](const Elf64_Phdr& segment) { return segment.p_type == PT_DYNAMIC; };
    const auto dynamic = std::find_if(segments_.begin(), segments_.end(), is_dynamic);
    if (dynamic == segments_.end()) return unfit("no dynamic section");
    if (std::count_if(segments_.begin(), segments_.end(), is_dynamic) != 1) {
      return unfit("several dynamic sections");
    }
    // The loader reads this section at its address, we read it at its offset: both must be one.
    if (offset_of(dynamic->p_vaddr, dynamic->p_filesz) != dynamic->p_offset) {
      return unfit("dynamic section not where it is loaded");
    }
    const std::size_t count = dynamic->p_filesz / sizeof(Elf64_Dyn);
    for (std::size_t i = 0; i < std::min(count, kMaxDynamicEntries); ++i) {
      const auto entry = record_at<Elf64_Dyn>(dynamic->p_offset + i * sizeof(Elf64_Dyn));
      if (!entry) return unfit("dynamic section outside the file");
      if (entry->d_tag == DT_NULL) return Status::ok();
      if (is_refused_tag(entry->d_tag)) {
        return unfit("dynamic tag " + std::to_string(entry->d_tag) +
                     " (search path, audit, filter or text relocation)");
      }
      if (entry->d_tag == DT_FLAGS && (entry->d_un.d_val & DF_TEXTREL) != 0) {
        return unfit("has text relocations");
      }
      if (entry->d_tag == DT_FLAGS && (entry->d_un.d_val & DF_STATIC_TLS) != 0) {
        return unfit("needs static thread-local storage");
      }
      if (entry->d_tag == DT_FLAGS_1 && (entry->d_un.d_val & DF_1_PIE) != 0) {
        return unfit("is a program");
      }
      if (entry->d_tag == DT_NEEDED) section.needed.push_back(entry->d_un.d_val);
      if (entry->d_tag == DT_STRTAB) section.string_table = entry->d_un.d_ptr;
      if (entry->d_tag == DT_STRSZ) section.string_table_size = entry->d_un.d_val;
    }
    return unfit("dynamic section without end");
  }

  Status check_needed(const DynamicSection& section) const {
    if (section.needed.empty()) return Status::ok();
    if (!section.string_table) return unfit("no string table");
    const auto offset = offset_of(*section.string_table, section.string_table_size);
    if (!offset) return unfit("string table outside the file");
    const std::string_view strings(reinterpret_cast<const char*>(image_.data()) + *offset,
                                   section.string_table_size);
    for (const std::uint64_t position : section.needed) {
      if (position >= strings.size()) return unfit("library name outside the string table");
      const std::string_view rest = strings.substr(position);
      const std::size_t end = rest.find('\0');
      if (end == std::string_view::npos) return unfit("library name without end");
      const std::string name(rest.substr(0, end));
      if (!is_allowed_library(name)) return unfit("needs a library that is not allowed: " + name);
    }
    return Status::ok();
  }

  const std::span<const std::byte> image_;
  std::vector<Elf64_Phdr> segments_;
};

}  // namespace

Status check_elf(std::span<const std::byte> image) { return ElfChecker(image).run(); }

}  // namespace eagercache
