#pragma once

// What torch.profiler, and whoever else listens to at::RecordFunction, sees of the runs of kernels.
// The event of a kernel stands below the one of its operator, which PyTorch makes, and names the
// entry that the kernel was loaded from. On CUDA the profiler hangs what is launched meanwhile
// below it.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

namespace eagercache {

// Who listens to this thread's functions just now; nothing where nobody does. Costs about 10 ns
// where nobody does; a hit asks somebody_may_listen() first.
std::optional<at::StepCallbacks> profile_listeners();

// What a thread knows of its listeners. Profilers add theirs thread by thread, and the list of
// those stays where it is as long as its thread lives. Listeners to all threads are in a list with
// a lock, so that only every so many hits ask for them.
struct ThreadListeners {
  const at::RecordFunctionCallbacks* own = nullptr;  // set when `unasked` was 0
  std::uint32_t unasked = 0;                         // hits until PyTorch is asked again
  static constexpr std::uint32_t kUnasked = 63;
};
extern constinit thread_local ThreadListeners thread_listeners
    __attribute__((tls_model("initial-exec")));

// False where no profiler of this thread listens. A listener to all threads is noticed after 64
// calls at the latest. Any thread; a few loads.
inline bool somebody_may_listen() noexcept {
  ThreadListeners& mine = thread_listeners;
  if (mine.unasked == 0) [[unlikely]] {
    return true;
  }
  --mine.unasked;
  return !mine.own->empty();
}

// So much of an entry's digest is shown to people; `eagercache show` takes it.
inline constexpr std::size_t kShownDigits = 12;

// "eagercache 3fa91c2b07de"
std::string event_name(std::string_view entry);
// "module: layers.0.mlp [eagercache 3fa91c2b07de]"
std::string module_event_name(std::string_view module, std::string_view entry);

// "parameter layers.0.scale, float32[16]"
std::string shown_tensor(std::string_view origin, const at::Tensor& tensor);

// From its making to its end on this thread's profile.
class ProfileEvent {
 public:
  // What a kernel's inputs are, by Inductor's names of them.
  using Arguments = std::unordered_map<std::string, c10::IValue>;

  // `tensors` are shown with their sizes where a listener asks for inputs, and so is what
  // `arguments` says, which may be empty. `sequence` is the number of the autograd node that the
  // run makes, by which profilers find its backward; -1 for none. What listeners throw is reported
  // by PyTorch and goes no further.
  ProfileEvent(at::StepCallbacks&& listeners, std::string name,
               std::span<const at::Tensor* const> tensors = {}, std::int64_t sequence = -1,
               const Arguments& arguments = {}) noexcept;
  ProfileEvent(const ProfileEvent&) = delete;
  ProfileEvent& operator=(const ProfileEvent&) = delete;

 private:
  at::RecordFunction event_;
};

}  // namespace eagercache
