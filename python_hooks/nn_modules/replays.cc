#include "python_hooks/nn_modules/replays.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <thread>
#include <utility>

#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/device/cuda_graph.h"
#include "dispatcher/hook/inside_guard.h"
#include "python_hooks/nn_modules/record.h"
#include "python_hooks/nn_modules/registry.h"

namespace eagercache {
namespace {

namespace py = pybind11;

// Inputs of the call up to so many bytes are copied, wherever they lie: that costs what a check of
// where they lie saves.
constexpr std::size_t kAlwaysCopied = 64 * 1024;
// More are not copied for each call: it would cost what is gained.
constexpr std::size_t kMostCopied = 64;
// From letting go of the GIL to a call of the driver takes a thread less than a microsecond, unless
// it loses its core in between.
constexpr std::chrono::microseconds kUntilOthersWait(200);

py::object& handler() {
  static auto* const object = new py::object();
  return *object;
}

bool graphs_are_on = false;

bool writes(const ModuleKernel& kernel, std::size_t input) {
  return std::ranges::any_of(
      kernel.writes, [&](const ModuleKernel::Write& write) { return write.input == input; });
}

// What a kernel writes into, which two runs are to find alike.
class Written {
 public:
  Written(const ModuleKernel& kernel, std::span<const at::Tensor* const> inputs) {
    const c10::InferenceMode mode;  // or it could not be written from here
    for (const ModuleKernel::Write& write : kernel.writes) {
      // With a version counter of its own: nobody is to see this.
      tensors_.push_back(inputs[write.input]->variable_data());
      held_.push_back(tensors_.back().clone());
      answers_.push_back(at::empty_like(held_.back()));  // memory that fails to come does so here
    }
  }
  // What it is now, behind `answers`; and then what it was.
  void take(std::vector<at::Tensor>& answers) {
    const c10::InferenceMode mode;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      answers.push_back(answers_[i].copy_(tensors_[i]));
      tensors_[i].copy_(held_[i]);
    }
  }

 private:
  std::vector<at::Tensor> tensors_, held_, answers_;
};

}  // namespace

void set_replay_handler(py::object object) {
  graphs_are_on = !object.is_none() && GraphDriver::get() != nullptr;
  handler() = std::move(object);
}

bool replays_are_made() noexcept { return graphs_are_on; }

// ---- the calls of a kernel
// -----------------------------------------------------------------------

ModuleReplays::Entry& ModuleReplays::find(std::span<const Word> words) {
  const auto found = std::ranges::find_if(
      entries_, [&](const Entry& entry) { return std::ranges::equal(words, entry.words); });
  if (found == entries_.end()) {
    if (entries_.size() == kMaxEntries) {
      entries_.pop_back();
    }
    entries_.emplace_front().words.assign(words.begin(), words.end());
  } else {
    entries_.splice(entries_.begin(), entries_, found);
  }
  return entries_.front();
}

void ModuleReplays::leave(Entry& entry, const std::string& reason) {
  entry.state = State::kOff;
  entry.graph.reset();
  entry.trial.reset();
  said_ = "not replayed: " + reason;
}

void ModuleReplays::count(Entry& entry, ModuleKernel& kernel,
                          std::span<const at::Tensor* const> inputs, void* stream) {
  const bool begins = entry.addresses.empty() || entry.stream != stream;
  entry.addresses.resize(inputs.size());
  entry.moves.resize(inputs.size());
  entry.stream = stream;
  entry.calls = begins ? 1 : entry.calls + 1;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const void* const address = inputs[i]->const_data_ptr();
    if (!begins && address != std::exchange(entry.addresses[i], address)) {
      if (kernel.inputs[i].from_module || writes(kernel, i)) {
        entry.calls = 1;  // its parameters were replaced, or it has another cache
      } else {
        entry.moves[i] = true;
      }
    }
    entry.addresses[i] = address;
  }
}

void ModuleReplays::capture(Entry& entry, ModuleKernel& kernel,
                            std::span<const at::Tensor* const> inputs) {
  if (++entry.captures > kMaxCaptures) {
    leave(entry, "what it reads keeps moving");
    return;
  }
  std::vector<bool> copied(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    copied[i] = !kernel.inputs[i].from_module && !writes(kernel, i) &&
                (entry.moves[i] || inputs[i]->nbytes() <= kAlwaysCopied);
  }
  if (static_cast<std::size_t>(std::ranges::count(copied, true)) > kMostCopied) {
    leave(entry, "it is called with too many tensors");
    return;
  }
  // The GIL is released below, and the module's tensors may be replaced meanwhile.
  std::vector<at::Tensor> held;
  std::vector<const at::Tensor*> pointers;
  for (const at::Tensor* input : inputs) {
    held.push_back(*input);
  }
  for (const at::Tensor& input : held) {
    pointers.push_back(&input);
  }
  CaptureRequest request(kernel, pointers, copied, entry.stream);
  capturing_ = true;
  std::string reason = "its capture failed";
  try {
    const InsideGuard inside;
    modules_step_aside(true);
    const py::object said = handler()(py::cast(&request, py::return_value_policy::reference));
    modules_step_aside(false);
    reason = said.cast<std::string>();
  } catch (py::error_already_set& error) {
    modules_step_aside(false);
    error.discard_as_unraisable("eagercache");
  }
  capturing_ = false;
  std::shared_ptr<const ContainerGraph> graph = request.take();
  if (reason == "busy") {
    entry.calls = 1;
    --entry.captures;
  } else if (!reason.empty() || graph == nullptr) {
    leave(entry, reason);
  } else {
    entry.graph = std::move(graph);
    entry.trial = std::make_shared<ReplayTrial>();
    entry.state = State::kTrial;
  }
}

void ModuleReplays::judge(Entry& entry) {
  const ReplayTrial::Verdict verdict = entry.trial->verdict();
  if (verdict == ReplayTrial::Verdict::kOpen) {
    return;
  }
  const ReplayTrial::Times run = entry.trial->run();
  const ReplayTrial::Times replayed = entry.trial->replayed();
  char text[160];
  std::snprintf(text, sizeof(text),
                "%zu nodes, %.3f ms in place of %.3f, host %.3f in place of %.3f",
                entry.graph->num_nodes(), static_cast<double>(replayed.device),
                static_cast<double>(run.device), static_cast<double>(replayed.host),
                static_cast<double>(run.host));
  if (verdict == ReplayTrial::Verdict::kRun) {
    leave(entry, std::string("that is no faster: ") + text);
    return;
  }
  entry.state = State::kReplay;
  entry.trial.reset();
  said_ = std::string("replayed as a CUDA graph: ") + text;
}

ModuleReplays::Plan ModuleReplays::plan(ModuleKernel& kernel, std::span<const Word> words,
                                        std::span<const at::Tensor* const> inputs, void* stream) {
  if (capturing_) {
    return {};  // in another thread, which has an entry in its hand
  }
  Entry& entry = find(words);
  if (entry.state == State::kOff) {
    return {};
  }
  if (entry.graph != nullptr && entry.stream == stream &&
      (entry.graph->lane().closed() || !entry.graph->reads(inputs))) {
    // Another graph is made when the call has come often enough again.
    entry.graph.reset();
    entry.trial.reset();
    entry.state = State::kCounting;
    count(entry, kernel, inputs, stream);
    entry.calls = 1;
    return {};
  }
  if (entry.state == State::kCounting) {
    count(entry, kernel, inputs, stream);
    if (entry.calls >= kCaptureAt && !is_capturing(kernel.device)) {
      capture(entry, kernel, inputs);
    }
    return {};
  }
  if (entry.stream != stream || is_capturing(kernel.device)) {
    return {};
  }
  if (entry.state == State::kTrial) {
    judge(entry);
  }
  if (entry.state == State::kOff) {
    return {};
  }
  if (entry.trial == nullptr) {
    return {entry.graph, nullptr, nullptr};
  }
  const bool replays = entry.trial->replays_next();
  return {replays ? entry.graph : nullptr, entry.trial, entry.trial->begin(stream)};
}

// ---- a capture
// -----------------------------------------------------------------------------------

c10::Device CaptureRequest::device() const noexcept { return kernel_.device; }

std::string CaptureRequest::capture(std::shared_ptr<GraphLane> lane) {
  std::string reason;
  // With the GIL. While any stream is captured, the driver refuses to wait for the whole device:
  // torch.cuda.synchronize() of another thread would raise, and the capture fail. No thread of
  // Python's comes to such a call meanwhile; one that has just let go of the GIL for it gets there.
  std::this_thread::sleep_for(kUntilOthersWait);
  graph_ = ContainerGraph::capture(*kernel_.model, inputs_, copied_, std::move(lane), &reason);
  return reason;
}

std::vector<at::Tensor> CaptureRequest::outputs(bool replayed) {
  std::vector<at::Tensor> tensors(kernel_.model->num_outputs());
  LoadedKernel::Outcome outcome = LoadedKernel::Outcome::kNotStarted;
  const py::gil_scoped_release no_gil;
  const InsideGuard inside;
  Written written(kernel_, inputs_);
  if (replayed) {
    outcome = graph_ == nullptr ? outcome : graph_->launch(inputs_, tensors);
  } else {
    std::vector<ModelContainer::TensorHandle> handles;
    for (const at::Tensor* input : inputs_) {
      handles.push_back(new at::Tensor(*input));
    }
    outcome = kernel_.model->run(handles, tensors, kernel_.device);
  }
  written.take(tensors);
  if (outcome != LoadedKernel::Outcome::kAnswered) {
    throw std::runtime_error("it gave no answer");
  }
  return tensors;
}

}  // namespace eagercache
