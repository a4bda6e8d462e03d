#include <cstdio>
#include <cstdlib>
#include <string>

#include "bench/overhead/overhead_calls.h"
#include "eagercache/eagercache.h"

// What hits of compiled kernels cost from C++, as overhead_side.cc's forms: the kernels are those
// of the store of EAGERCACHE_DIR, which a Python process has filled (overhead_cpp.py).
namespace eagercache {
namespace {

int serve_hits() {
  EnableOptions options;
  for (const std::string& name : bench::call_names()) {
    const bench::Call call = bench::make_call(name, 8);
    const std::string overload = call.overload;
    options.operators.push_back(call.op + (overload.empty() ? "" : "." + overload));
  }
  options.always = true;
  options.preload = true;
  if (const EnableResult enabled = enable(options); !enabled) {
    std::fprintf(stderr, "%s\n", enabled.reason.c_str());
    return 1;
  }
  const auto prepare = [](const std::string& /*name*/, const bench::Call& call,
                          const bench::Call& /*other*/, bool boxed) {
    for (int i = 0; i < 3; ++i) {
      call.make();
    }
    const std::uint64_t hits = statistics().hits;
    call.make();
    return !boxed && statistics().hits - hits == 1;
  };
  return bench::serve(bench::all_blocks(prepare));
}

}  // namespace
}  // namespace eagercache

int main() { return eagercache::serve_hits(); }
