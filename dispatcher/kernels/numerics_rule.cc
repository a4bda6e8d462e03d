#include "dispatcher/kernels/numerics_rule.h"

#include "guards/base/left_out.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

namespace eagercache {
namespace {

// Another kernel, which leaves those calls to native that every replica has to compute alike. Owns
// nothing: kernels live for ever.
class ReplicaKernel final : public LoadedKernel {
 public:
  explicit ReplicaKernel(LoadedKernel* kernel) : kernel_(kernel) {}

  Outcome run(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
              c10::Device device) noexcept override {
    return computes_redundantly() ? Outcome::kNotStarted : kernel_->answer(inputs, outputs, device);
  }
  std::size_t num_inputs() const noexcept override { return kernel_->num_inputs(); }
  std::size_t num_outputs() const noexcept override { return kernel_->num_outputs(); }
  bool writes_inputs() const noexcept override { return kernel_->writes_inputs(); }

 private:
  LoadedKernel* const kernel_;
};

}  // namespace

std::string numerics_refusal(std::string_view proved, Numerics asked, bool deterministic,
                             bool writes_arguments) {
  if (left_out("check", "numerics")) {
    return {};
  }
  if (proved == "bitwise") {
    return {};
  }
  if (deterministic) {
    return "not bitwise, and deterministic algorithms are asked for";
  }
  if (asked == Numerics::kBitwise) {
    return "not bitwise, and numerics is bitwise";
  }
  if (writes_arguments) {
    return "not bitwise, and the operator writes its arguments";
  }
  return {};
}

bool computes_redundantly() noexcept {
  return !c10::GradMode::is_enabled() && torch::autograd::get_current_graph_task_id() == -1;
}

LoadedKernel* make_replica_kernel(LoadedKernel* kernel) { return new ReplicaKernel(kernel); }

}  // namespace eagercache
