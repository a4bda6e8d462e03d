#pragma once

#include <string>
#include <string_view>

#include "dispatcher/base/policy.h"
#include "dispatcher/kernels/loaded_kernel.h"

namespace eagercache {

// Why a kernel whose proof ended in the class `proved` ("bitwise", "accurate" or "") may not answer
// calls that write their arguments or do not; empty when it may. Those that do have bitwise kernels
// only: a parameter that differs in its last bit stays different, on every
// replica in another way.
std::string numerics_refusal(std::string_view proved, Numerics asked, bool deterministic,
                             bool writes_arguments);

// Whether the thread computes what other replicas of a data-parallel job may be computing from
// equal data: outside of a backward pass, with gradients off. Optimizer steps, gradient clipping
// and moving averages are; forward and backward passes, whose gradients are reduced afterwards, are
// not. Reads thread-locals.
bool computes_redundantly() noexcept;

// `kernel` for a job of several replicas: where the thread computes redundantly it does not start,
// so that native answers on every replica. Both live for ever.
LoadedKernel* make_replica_kernel(LoadedKernel* kernel);

}  // namespace eagercache
