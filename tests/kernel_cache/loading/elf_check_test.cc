#include "kernel_cache/loading/elf_check.h"

#include <elf.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "tests/kernel_cache/test_objects.h"

namespace eagercache {
namespace {

// A copy of exactly the image's size on the heap: AddressSanitizer sees every read beyond it.
Status check(const std::string& image) {
  const std::vector<char> exact(image.begin(), image.end());
  return check_elf(std::as_bytes(std::span<const char>(exact)));
}

const std::string& good() {
  static const std::string image = read_bytes(test_object("object_answer"));
  return image;
}

template <typename Edit>
std::string with_header(Edit edit) {
  std::string image = good();
  Elf64_Ehdr header;
  std::memcpy(&header, image.data(), sizeof header);
  edit(header);
  std::memcpy(image.data(), &header, sizeof header);
  return image;
}

// `edit` sees every program header in turn.
template <typename Edit>
std::string with_segments(Edit edit) {
  std::string image = good();
  Elf64_Ehdr header;
  std::memcpy(&header, image.data(), sizeof header);
  for (std::size_t i = 0; i < header.e_phnum; ++i) {
    char* const place = image.data() + header.e_phoff + i * sizeof(Elf64_Phdr);
    Elf64_Phdr segment;
    std::memcpy(&segment, place, sizeof segment);
    edit(segment);
    std::memcpy(place, &segment, sizeof segment);
  }
  return image;
}

// Replaces the first dynamic entry of tag `from`.
std::string with_dynamic(std::int64_t from, std::int64_t tag, std::uint64_t value) {
  std::string image = good();
  Elf64_Phdr dynamic{};
  with_segments([&](Elf64_Phdr& segment) {
    if (segment.p_type == PT_DYNAMIC) dynamic = segment;
  });
  for (std::size_t i = 0; i < dynamic.p_filesz / sizeof(Elf64_Dyn); ++i) {
    char* const place = image.data() + dynamic.p_offset + i * sizeof(Elf64_Dyn);
    Elf64_Dyn entry;
    std::memcpy(&entry, place, sizeof entry);
    if (entry.d_tag != from) continue;
    entry.d_tag = tag;
    entry.d_un.d_val = value;
    std::memcpy(place, &entry, sizeof entry);
    return image;
  }
  ADD_FAILURE() << "no dynamic entry of tag " << from;
  return image;
}

void expect_refused(const std::string& image, const std::string& reason) {
  const Status status = check(image);
  EXPECT_EQ(status.code(), StatusCode::kIncompatible) << reason;
  EXPECT_NE(status.message().find(reason), std::string::npos) << status.to_string();
}

TEST(ElfCheckTest, PlainKernelsAndTheLibrariesOfTheAllowListPass) {
  EXPECT_TRUE(check(good())) << check(good()).to_string();
  const Status with_libm = check(read_bytes(test_object("object_needs_math")));
  EXPECT_TRUE(with_libm) << with_libm.to_string();
  const Status dynamic_tls = check(read_bytes(test_object("object_dynamic_tls")));
  EXPECT_TRUE(dynamic_tls) << dynamic_tls.to_string();
}

TEST(ElfCheckTest, ObjectsThatTheLinkerMadeUnfitAreRefused) {
  expect_refused(read_bytes(test_object("object_static_tls")), "thread-local");
  expect_refused(read_bytes(test_object("object_executable_stack")), "executable stack");
  expect_refused(read_bytes(test_object("object_rpath")), "search path");
  expect_refused(read_bytes(test_object("object_runpath")), "search path");
  expect_refused(read_bytes(test_object("object_needs_stranger")), "libstranger.so.1");
  expect_refused(read_bytes("/proc/self/exe"), "program");
}

TEST(ElfCheckTest, HeadersOfOtherMachinesAndFormsAreRefused) {
  expect_refused("", "not ELF");
  expect_refused("#!/bin/sh\n" + std::string(200, ' '), "not ELF");
  expect_refused(with_header([](Elf64_Ehdr& h) { h.e_ident[EI_CLASS] = ELFCLASS32; }), "64-bit");
  expect_refused(with_header([](Elf64_Ehdr& h) { h.e_ident[EI_DATA] = ELFDATA2MSB; }), "64-bit");
  expect_refused(with_header([](Elf64_Ehdr& h) { h.e_machine = EM_AARCH64; }), "machine");
  expect_refused(with_header([](Elf64_Ehdr& h) { h.e_type = ET_EXEC; }), "ET_DYN");
  expect_refused(with_header([](Elf64_Ehdr& h) { h.e_phnum = 0; }), "program headers");
  expect_refused(with_header([](Elf64_Ehdr& h) { h.e_phnum = 65535; }), "program headers");
  expect_refused(with_header([](Elf64_Ehdr& h) { h.e_phoff = ~std::uint64_t{0} - 8; }), "outside");
  expect_refused(with_header([](Elf64_Ehdr& h) { h.e_phoff = good().size() - 8; }), "outside");
}

TEST(ElfCheckTest, SegmentsMustLieInTheFileAndBeWritableOrExecutable) {
  const auto every_load = [](auto edit) {
    return with_segments([edit](Elf64_Phdr& segment) {
      if (segment.p_type == PT_LOAD) edit(segment);
    });
  };
  expect_refused(every_load([](Elf64_Phdr& s) { s.p_offset = good().size() + 1; }), "outside");
  expect_refused(every_load([](Elf64_Phdr& s) { s.p_filesz = ~std::uint64_t{0}; }), "outside");
  expect_refused(every_load([](Elf64_Phdr& s) { s.p_memsz = 0; }), "smaller");
  expect_refused(every_load([](Elf64_Phdr& s) { s.p_vaddr = ~std::uint64_t{0} - 16; }), "wraps");
  expect_refused(every_load([](Elf64_Phdr& s) { s.p_flags = PF_R | PF_W | PF_X; }), "writable");
  expect_refused(every_load([](Elf64_Phdr& s) { s.p_type = PT_NULL; }), "nothing to load");
  expect_refused(with_segments([](Elf64_Phdr& s) {
                   if (s.p_type == PT_GNU_STACK) s.p_type = PT_NULL;
                 }),
                 "stack");
  expect_refused(with_segments([](Elf64_Phdr& s) {
                   if (s.p_type == PT_DYNAMIC) s.p_type = PT_NULL;
                 }),
                 "no dynamic section");
  expect_refused(with_segments([](Elf64_Phdr& s) {
                   if (s.p_type == PT_DYNAMIC) s.p_vaddr += 16;
                 }),
                 "not where it is loaded");
}

TEST(ElfCheckTest, DynamicEntriesThatChangeTheSearchOrTheTextAreRefused) {
  for (const std::int64_t tag :
       std::initializer_list<std::int64_t>{DT_RPATH, DT_RUNPATH, DT_TEXTREL, DT_AUDIT, DT_DEPAUDIT,
                                           DT_AUXILIARY, DT_FILTER, DT_CONFIG}) {
    expect_refused(with_dynamic(DT_SYMENT, tag, 1), "dynamic tag");
  }
  expect_refused(with_dynamic(DT_SYMENT, DT_FLAGS, DF_TEXTREL), "text relocations");
  expect_refused(with_dynamic(DT_SYMENT, DT_FLAGS_1, DF_1_PIE), "program");
  expect_refused(with_dynamic(DT_SYMENT, DT_NEEDED, ~std::uint64_t{0}), "outside the string table");
  expect_refused(with_dynamic(DT_SYMENT, DT_NEEDED, 0), "not allowed");
}

TEST(ElfCheckTest, EveryTruncationIsJudgedWithoutReadingBeyondTheEnd) {
  std::size_t refused = 0;
  for (std::size_t length = 0; length < good().size(); ++length) {
    if (!check(good().substr(0, length))) ++refused;
  }
  // The section headers at the end are not loaded and may be missing.
  EXPECT_GT(refused, good().size() / 4);
}

TEST(ElfCheckTest, RandomDamageNeverReadsBeyondTheEnd) {
  constexpr unsigned int kSeed = 7;
  std::mt19937_64 random(kSeed);
  std::size_t refused = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string image = good();
    for (int edit = 0; edit < 8; ++edit) {
      // Mostly the headers: behind them a flip is seldom looked at.
      const std::size_t place = random() % (random() % 4 == 0 ? image.size() : 640);
      image[place] = static_cast<char>(random());
    }
    if (!check(image)) ++refused;
  }
  EXPECT_GT(refused, 10'000U) << "seed " << kSeed;
}

}  // namespace
}  // namespace eagercache
