#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>

namespace eagercache {

// Puts the process's numeric settings back at the end of the scope.
class RestoredGlobals {
 public:
  RestoredGlobals() = default;
  RestoredGlobals(const RestoredGlobals&) = delete;
  RestoredGlobals& operator=(const RestoredGlobals&) = delete;
  ~RestoredGlobals() {
    at::Context& context = at::globalContext();
    context.setDeterministicAlgorithms(deterministic_, warn_only_);
    context.setDeterministicFillUninitializedMemory(fill_);
    context.setFlushDenormal(false);
    c10::set_default_dtype(default_dtype_);
    at::set_num_threads(threads_);
  }

 private:
  const bool deterministic_ = at::globalContext().deterministicAlgorithms();
  const bool warn_only_ = at::globalContext().deterministicAlgorithmsWarnOnly();
  const bool fill_ = at::globalContext().deterministicFillUninitializedMemory();
  const caffe2::TypeMeta default_dtype_ = c10::get_default_dtype();
  const int threads_ = at::get_num_threads();
};

}  // namespace eagercache
