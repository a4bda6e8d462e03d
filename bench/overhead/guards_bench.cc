#include <benchmark/benchmark.h>

#include <array>
#include <cstdint>
#include <vector>

#include "guards/key/call_key.h"
#include "guards/table/epoch.h"
#include "guards/table/guard_table.h"

// Price of the guards on the path of a hit: writing the key, hashing it, looking it up.
namespace eagercache {
namespace {

constexpr std::array<std::int64_t, 2> kSizes = {512, 256};
constexpr std::array<std::int64_t, 2> kStrides = {256, 1};

// aten::add: two matrices and alpha, 13 words.
void put_add(KeyBuffer& buffer, const std::int64_t* sizes) {
  constexpr TensorTraits kTraits{.dtype = 6, .dim = 2};
  buffer.clear();
  buffer.put_state({});
  buffer.put_tensor(kTraits, sizes, kStrides.data());
  buffer.put_tensor(kTraits, sizes, kStrides.data());
  buffer.put_int(1);
}

void BM_WriteKeyOfAdd(benchmark::State& state) {
  KeyBuffer buffer;
  std::array<std::int64_t, 2> sizes = kSizes;
  for (auto _ : state) {
    benchmark::DoNotOptimize(sizes);
    put_add(buffer, sizes.data());
    benchmark::DoNotOptimize(buffer.words().data());
    benchmark::ClobberMemory();
  }
}
BENCHMARK(BM_WriteKeyOfAdd);

void BM_Hash(benchmark::State& state) {
  std::vector<Word> words(static_cast<std::size_t>(state.range(0)), 3);
  for (auto _ : state) {
    benchmark::DoNotOptimize(words.data());
    benchmark::ClobberMemory();
    benchmark::DoNotOptimize(hash_words(words));
  }
}
BENCHMARK(BM_Hash)->Arg(4)->Arg(8)->Arg(10)->Arg(16)->Arg(64);

// The next hash begins when this one is known.
void BM_HashLatency(benchmark::State& state) {
  std::vector<Word> words(static_cast<std::size_t>(state.range(0)), 3);
  for (auto _ : state) {
    words[0] = hash_words(words);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(BM_HashLatency)->Arg(8)->Arg(10);

void BM_ReadSection(benchmark::State& state) {
  for (auto _ : state) {
    const ReadSection section;
    benchmark::ClobberMemory();
  }
}
BENCHMARK(BM_ReadSection);

struct Filled {
  explicit Filled(Word entries) {
    for (Word i = 0; i < entries; ++i) {
      keys.emplace_back(10, 7).back() = i;
      hashes.push_back(hash_words(keys.back()));
      table.set_kernel(keys.back(), hashes.back(), this);
    }
  }
  GuardTable table;
  std::vector<std::vector<Word>> keys;
  std::vector<std::uint64_t> hashes;
};

// A key of ten words among range(0), the hash given; the same key each time, as in a loop over one
// operator.
void BM_FindHit(benchmark::State& state) {
  static Filled* const kTables[] = {new Filled(1), new Filled(64), new Filled(4096)};
  const Filled& filled = *kTables[state.range(0)];
  const std::size_t at = filled.keys.size() / 2;
  for (auto _ : state) {
    benchmark::DoNotOptimize(filled.keys[at].data());
    benchmark::DoNotOptimize(filled.table.find(filled.keys[at], filled.hashes[at]));
  }
}
BENCHMARK(BM_FindHit)->Arg(0)->Arg(1)->Arg(2);
BENCHMARK(BM_FindHit)->Arg(1)->Threads(2);

void BM_FindMiss(benchmark::State& state) {
  static const Filled kFilled(64);
  const std::vector<Word> key(10, 12345);
  const std::uint64_t hash = hash_words(key);
  for (auto _ : state) benchmark::DoNotOptimize(kFilled.table.find(key, hash));
}
BENCHMARK(BM_FindMiss);

void BM_WriteHashAndFindAdd(benchmark::State& state) {
  GuardTable table;
  KeyBuffer buffer;
  std::array<std::int64_t, 2> sizes = kSizes;
  put_add(buffer, sizes.data());
  table.set_kernel(buffer.words(), hash_words(buffer.words()), &table);
  for (auto _ : state) {
    benchmark::DoNotOptimize(sizes);
    put_add(buffer, sizes.data());
    benchmark::DoNotOptimize(table.find(buffer.words(), hash_words(buffer.words())));
  }
}
BENCHMARK(BM_WriteHashAndFindAdd);

// A scalar that never repeats: every call inserts a key and, in the long run, evicts one.
void BM_NoteMissOfANewKey(benchmark::State& state) {
  GuardTable table;
  std::array<Word, 10> key{};
  for (auto _ : state) {
    ++key[9];
    benchmark::DoNotOptimize(table.note_miss(key, hash_words(key)));
  }
}
BENCHMARK(BM_NoteMissOfANewKey);

}  // namespace
}  // namespace eagercache
