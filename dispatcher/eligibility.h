#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <string>

#include "dispatcher/operator_effects.h"
#include "guards/argument_plan.h"

namespace eagercache {

// Whether calls of an operator may be answered by a kernel of ours at a backend key, and why not.
struct Eligibility {
  bool eligible = false;
  std::string reason;  // why not; one clause
  // The operator is made of others above the backend (composite-implicit): overriding it at a
  // backend key would take its gradient away. Its parts can be hooked instead.
  bool composite = false;
  OperatorEffects effects;
  ArgumentPlan plan;            // when eligible
  std::size_t num_returns = 0;  // when eligible; all of them tensors
};

// `key` is a backend key (CPU, CUDA). Reads the registry only.
Eligibility check_eligibility(const c10::OperatorHandle& op, c10::DispatchKey key);

}  // namespace eagercache
