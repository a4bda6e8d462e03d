#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

// The calls that the benchmarks of overhead make from C++, and how they take turns with other
// processes (turns.py). Nothing of eagercache: a process that hooks nothing makes them, too.
namespace eagercache::bench {

struct Call {
  const char* op;  // "aten::add"
  const char* overload;
  std::vector<c10::IValue> boxed;  // the arguments
  std::size_t num_tensors;         // among them
  bool writes;                     // no output of its own
  std::function<void()> make;
};

// "add.out", "cat of 4" and so on, as overhead.py calls them.
const std::vector<std::string>& call_names();

// 0 elements stand for one element without dimensions. Tensors are inference tensors where the
// thread is in inference mode.
Call make_call(std::string_view name, std::int64_t elements,
               c10::DeviceType device = c10::DeviceType::CPU);

// Nanoseconds a call, the mean of so many.
using Block = std::function<double(std::size_t calls)>;
using Blocks = std::map<std::string, Block>;  // by "add.out, 8, inference"

// What surrounds every block of one side; may be empty.
using Around = std::function<void(const std::function<void()>& block)>;

// Blocks of all calls, of the sizes of EAGERCACHE_BENCH_SIZES ("0,8,4096") and of those whose name
// contains EAGERCACHE_BENCH_ONLY: of "inference" and "plain" tensors (which autograd looks at), and
// "boxed" calls of the former. `prepare` sees each call once, under the mode of its blocks, with
// another one of the same operator on one element more; those for which it is false are left out.
using Prepare =
    std::function<bool(const std::string& name, const Call& call, const Call& other, bool boxed)>;
Blocks all_blocks(const Prepare& prepare, const Around& around = {});

// Adds "abs, 8, threads 1" and "2": the wall time of a call where so many threads make calls, each
// on a core of its own where there are as many.
void add_thread_blocks(Blocks& blocks);

// Takes turns until nobody asks any more; the exit status.
int serve(const Blocks& blocks);

}  // namespace eagercache::bench
