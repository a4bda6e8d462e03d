#include "dispatcher/kernels/kernel_forms.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "dispatcher/kernels/bare_kernel.h"
#include "dispatcher/kernels/container_kernel.h"
#include "dispatcher/kernels/cuda_kernel.h"
#include "dispatcher/kernels/cuda_shape_kernel.h"
#include "dispatcher/kernels/shape_kernel.h"

namespace eagercache {
namespace {

// A kernel of some form as one of any.
template <typename Kernel>
Result<std::unique_ptr<LoadedKernel>> of_any_form(Result<std::unique_ptr<Kernel>> kernel) {
  if (!kernel) {
    return kernel.status();
  }
  return std::unique_ptr<LoadedKernel>(std::move(kernel).value());
}

}  // namespace

std::string kernel_identity(std::span<const ObjectRef> objects, c10::Device device,
                            const KernelForm& form) {
  std::string identity = device.str();
  for (const std::string* part : {&form.form, &form.launch_plan, &form.output_strides}) {
    identity += '\0' + *part;
  }
  for (const ObjectRef& object : objects) {
    identity += '\0' + object.digest.hex();
  }
  return identity;
}

Status check_form(const std::string& form) {
  static constexpr std::array<std::string_view, 4> kForms{"bare", "scalars", "shapes", "container"};
  return std::ranges::find(kForms, form) != kForms.end()
             ? Status::ok()
             : Status(StatusCode::kIncompatible,
                      "entries of form '" + form + "' are not understood");
}

Result<std::unique_ptr<LoadedKernel>> make_kernel(const SharedLibrary& library, c10::Device device,
                                                  const KernelForm& form) {
  if (form.form == "bare") {
    Result<LaunchPlan> plan = parse_launch_plan(form.launch_plan);
    if (!plan) {
      return plan.status();
    }
    return of_any_form(BareKernel::create(library, device, std::move(plan).value()));
  }
  if (form.form == "scalars") {
    Result<ScalarPlan> plan = parse_scalar_plan(form.launch_plan);
    if (!plan) {
      return plan.status();
    }
    return of_any_form(BareKernel::create(library, device, std::move(plan.value().plan),
                                          plan.value().num_scalars));
  }
  if (form.form == "shapes") {
    Result<ShapePlan> plan = parse_shape_plan(form.launch_plan);
    if (!plan) {
      return plan.status();
    }
    return of_any_form(CpuShapeKernel::create(library, device, std::move(plan).value()));
  }
  if (form.form == "container") {
    Result<std::unique_ptr<ContainerKernel>> kernel = ContainerKernel::create(library, device);
    if (!kernel) {
      return kernel.status();
    }
    if (Status status = kernel.value()->set_output_strides(form.output_strides); !status) {
      return status;
    }
    return std::unique_ptr<LoadedKernel>(std::move(kernel).value());
  }
  return check_form(form.form);
}

Result<std::unique_ptr<LoadedKernel>> make_cuda_kernel(std::span<const std::string> objects,
                                                       c10::Device device, const KernelForm& form) {
  if (form.form == "cuda_shapes") {
    Result<CudaShapePlan> plan = parse_cuda_shape_plan(form.launch_plan);
    if (!plan) {
      return plan.status();
    }
    return of_any_form(CudaShapeKernel::create(device, std::move(plan).value(), objects));
  }
  if (form.form != "cuda" && form.form != "cuda_scalars") {
    return Status(StatusCode::kIncompatible,
                  "entries of form '" + form.form + "' do not run on CUDA");
  }
  Result<CudaPlan> plan = form.form == "cuda" ? parse_cuda_plan(form.launch_plan)
                                              : parse_cuda_scalar_plan(form.launch_plan);
  if (!plan) {
    return plan.status();
  }
  return of_any_form(CudaKernel::create(device, std::move(plan).value(), objects));
}

}  // namespace eagercache
