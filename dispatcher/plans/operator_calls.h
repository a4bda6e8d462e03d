#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/inductor/aoti_torch/proxy_executor.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "dispatcher/base/locks.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// The operators of the program's own that a container calls in its midst, each through the
// dispatcher as eager does: what is registered for it now runs. What the container was compiled for
// is checked after every call: an operator may answer otherwise than it said when it was traced.
class OperatorCalls : public torch::aot_inductor::ProxyExecutor {
 public:
  // A container's text of its calls; worker/modules/custom_calls.py writes it.
  static constexpr const char* kSymbol = "eagercache_operators";

  // kIncompatible where the text is not understood.
  static Result<std::unique_ptr<OperatorCalls>> parse(const char* text);

  // Called by the container, for `tensors` of the call and behind them as many that take its
  // answer. Throws what the operator throws (see take_raised), and where it did what the container
  // cannot stand.
  void call_function(int index, int num_ints, std::int64_t* ints, int num_tensors,
                     AtenTensorHandle* tensors) override;

  // What an operator of the thread's last container run threw; null where none did.
  static std::exception_ptr take_raised() noexcept;
  static bool has_raised() noexcept;

 private:
  struct Argument {
    enum class Kind : std::uint8_t { kTensor, kTensors, kOptionalTensors, kValue };
    Kind kind = Kind::kValue;
    std::vector<int> places;  // among the call's tensors; -1 for none
    c10::IValue value;
  };
  struct Output {
    at::ScalarType dtype = at::kFloat;
    std::vector<std::int64_t> sizes, strides;
  };
  struct Call {
    std::string name, overload, schema;
    std::vector<Argument> arguments;
    std::vector<Output> outputs;
    std::vector<int> made_here;  // tensors of the call that the container may overwrite afterwards
    std::size_t num_tensors = 0;
  };

  static Call read_call(const void* json);
  static Argument read_argument(const void* json);
  static std::vector<c10::IValue> stack_of(const Call& call, std::span<AtenTensorHandle> tensors);
  c10::OperatorHandle find(std::size_t index);

  std::vector<Call> calls_;
  Mutex mutex_;
  std::vector<c10::OperatorHandle> found_ EAGERCACHE_GUARDED_BY(mutex_);
  std::uint64_t found_at_ EAGERCACHE_GUARDED_BY(mutex_) = 0;  // operator_epoch() then
};

// The grad mode of a call in whose container operators are called: they run under it.
class CallersGradMode {
 public:
  CallersGradMode() noexcept;
  ~CallersGradMode();
  CallersGradMode(const CallersGradMode&) = delete;
  CallersGradMode& operator=(const CallersGradMode&) = delete;
  static bool enabled() noexcept;

 private:
  bool before_;
};

}  // namespace eagercache
