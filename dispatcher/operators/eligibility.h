#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <string>
#include <vector>

#include "dispatcher/operators/operator_effects.h"
#include "guards/builder/argument_plan.h"

namespace eagercache {

// Whether calls of an operator may be answered by a kernel of ours at a backend key, and why not.
struct Eligibility {
  bool eligible = false;
  std::string reason;  // why not; one clause
  // The operator is made of others above the backend (composite-implicit): overriding it at a
  // backend key would take its gradient away. Its parts can be hooked instead.
  bool composite = false;
  OperatorEffects effects;      // moves_version: by native's kernel at this key, not above it
  ArgumentPlan plan;            // when eligible
  std::size_t num_returns = 0;  // when eligible; values on the stack, all of them tensors or lists
  // When eligible: for each return the argument that is handed back, or kFresh.
  static constexpr std::size_t kFresh = static_cast<std::size_t>(-1);
  std::vector<std::size_t> returned_arguments;
  bool returns_list = false;  // its only return is a list of tensors
};

// `key` is a backend key (CPU, CUDA). Reads the registry only.
Eligibility check_eligibility(const c10::OperatorHandle& op, c10::DispatchKey key);

}  // namespace eagercache
