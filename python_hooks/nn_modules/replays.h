#pragma once

// Which calls of a module's kernel are replayed as a CUDA graph: those with one form that come
// again and again, where that is faster. A ModuleKernel owns its replays. Under the GIL.

#include <pybind11/pybind11.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dispatcher/kernels/container_graph.h"
#include "dispatcher/kernels/replay_trial.h"
#include "guards/key/call_key.h"

namespace eagercache {

struct ModuleKernel;

// The calls of one kernel.
class ModuleReplays {
 public:
  // Tells what a call of such a form, in which the tensors of the container lie there, does:
  // `stream` is the current one of the device. Counts it, and has it captured when it has come
  // often enough. nullptr: the container runs.
  struct Plan {
    std::shared_ptr<const ContainerGraph> graph;
    std::shared_ptr<ReplayTrial> trial;  // to be told of the call's end; null where it is decided
    ReplayTrial::Call* timed = nullptr;
  };
  Plan plan(ModuleKernel& kernel, std::span<const Word> words,
            std::span<const at::Tensor* const> inputs, void* stream);

  std::uint64_t replayed() const noexcept { return replayed_; }
  void note_replayed() noexcept { ++replayed_; }
  // For people: what is replayed, or why it is not; empty when nothing has come often enough.
  const std::string& said() const noexcept { return said_; }

 private:
  enum class State : std::uint8_t { kCounting, kTrial, kReplay, kOff };
  struct Entry {
    std::vector<Word> words;
    State state = State::kCounting;
    void* stream = nullptr;
    std::uint32_t calls = 0;
    std::uint32_t captures = 0;
    std::vector<const void*> addresses;  // of the inputs, at the last call
    std::vector<bool> moves;             // inputs whose address changed between two calls
    std::shared_ptr<const ContainerGraph> graph;
    std::shared_ptr<ReplayTrial> trial;
  };
  static constexpr std::size_t kMaxEntries = 4;
  static constexpr std::uint32_t kCaptureAt = 16;
  static constexpr std::uint32_t kMaxCaptures = 6;

  Entry& find(std::span<const Word> words);
  void count(Entry& entry, ModuleKernel& kernel, std::span<const at::Tensor* const> inputs,
             void* stream);
  void capture(Entry& entry, ModuleKernel& kernel, std::span<const at::Tensor* const> inputs);
  void judge(Entry& entry);
  void leave(Entry& entry, const std::string& reason);

  std::list<Entry> entries_;  // the latest first
  bool capturing_ = false;    // a thread is in the handler, which releases the GIL
  std::uint64_t replayed_ = 0;
  std::string said_;
};

// A call that is to be captured, as the Python side gets it: it has the allocator's pools. Good
// until its handler returns.
class CaptureRequest {
 public:
  CaptureRequest(ModuleKernel& kernel, std::span<const at::Tensor* const> inputs,
                 const std::vector<bool>& copied, void* stream)
      : kernel_(kernel), inputs_(inputs), copied_(copied), stream_(stream) {}

  c10::Device device() const noexcept;
  // The user's stream, on which it will be replayed.
  void* stream() const noexcept { return stream_; }
  // See ContainerGraph::capture. Empty, or why it cannot be captured.
  std::string capture(std::shared_ptr<GraphLane> lane);
  // The answer of the container, or that of the graph, on the user's stream, which is current; and
  // behind it copies of what it wrote, which is put back. Throws std::runtime_error when there is
  // none.
  std::vector<at::Tensor> outputs(bool replayed);
  std::size_t num_nodes() const noexcept { return graph_ == nullptr ? 0 : graph_->num_nodes(); }

  std::unique_ptr<ContainerGraph> take() noexcept { return std::move(graph_); }

 private:
  ModuleKernel& kernel_;
  const std::span<const at::Tensor* const> inputs_;
  const std::vector<bool>& copied_;
  void* const stream_;
  std::unique_ptr<ContainerGraph> graph_;
};

// (CaptureRequest) -> str: captures it, and compares what it answers. Empty when it may be
// replayed, "busy" when it is to be asked again later, else why not. None, which is the default:
// nothing is replayed. Runs on the calling thread.
void set_replay_handler(pybind11::object handler);
bool replays_are_made() noexcept;

}  // namespace eagercache
