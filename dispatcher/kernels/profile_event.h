#pragma once

// What torch.profiler, and whoever else listens to at::RecordFunction, sees of the runs of kernels.
// The event of a kernel stands below the one of its operator, which PyTorch makes, and names the
// entry that the kernel was loaded from. On CUDA the profiler hangs what is launched meanwhile
// below it.

#include <ATen/record_function.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace eagercache {

// Who listens to this thread's functions just now; nothing where nobody does, which is known after
// two loads.
inline std::optional<at::StepCallbacks> profile_listeners() {
  return at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
}

// So much of an entry's digest is shown to people; `eagercache show` takes it.
inline constexpr std::size_t kShownDigits = 12;

// "eagercache 3fa91c2b07de"
std::string event_name(std::string_view entry);
// "module: layers.0.mlp [eagercache 3fa91c2b07de]"
std::string module_event_name(std::string_view module, std::string_view entry);

// From its making to its end on this thread's profile.
class ProfileEvent {
 public:
  // `tensors` are shown with their sizes where a listener asks for inputs. `sequence` is the number
  // of the autograd node that the run makes, by which profilers find its backward; -1 for none.
  // What listeners throw is reported by PyTorch and goes no further.
  ProfileEvent(at::StepCallbacks&& listeners, std::string name,
               std::span<const at::Tensor* const> tensors = {}, std::int64_t sequence = -1) noexcept;
  ProfileEvent(const ProfileEvent&) = delete;
  ProfileEvent& operator=(const ProfileEvent&) = delete;

 private:
  at::RecordFunction event_;
};

}  // namespace eagercache
