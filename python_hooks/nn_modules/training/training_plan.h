#pragma once

// How the two kernels of a module's training are called: what the forward gives and the backward
// takes.

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dispatcher/kernels/model_container.h"
#include "python_hooks/nn_modules/noise.h"

namespace eagercache {

// What is particular to the kernel of a call that needs gradients (joint_graph.py). Its forward
// gives the tensors of the answer, then the new values of the buffers it writes, then what is made
// for the backward alone. Never changes; never destroyed.
struct ModuleTraining {
  enum class Source : std::uint8_t { kInput, kOutput, kMade };
  // One input of the backward, in its layout.
  struct Saved {
    Source source = Source::kMade;
    std::size_t index = 0;
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
  };
  // The gradient of one output, which comes after them, in the layout that the backward reads.
  struct Tangent {
    std::size_t output = 0;
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
    // Of what an object in the answer holds, which programs seldom ask gradients of: the backward
    // does not read it, and the module's own one answers where there is such a gradient.
    bool in_object = false;
    // Which of the tangents are of parts of the answer that this one is computed from, as autograd
    // knows the module's own: with a tangent all of those behind it.
    std::vector<std::size_t> behind;
    // Of one that is behind another: the node's input that takes of its gradient what comes from
    // other parts, whose own gradients lead there as well.
    std::optional<std::size_t> counted;
  };
  // A tensor of the answer that is a view of another one, as autograd knows them.
  struct View {
    std::size_t output = 0;
    std::size_t of = 0;
    std::int64_t offset = 0;  // in its memory
  };
  struct Buffer {
    std::size_t input = 0;
    std::uint32_t steps = 0;  // by how much the module's own forward moves its version
    bool is_read = false;     // the answer or a gradient depends on what it holds before the call
  };
  struct Gradient {
    std::size_t input = 0;
    std::vector<std::size_t> tangents;  // those on which it depends
    std::vector<std::int64_t> strides;  // as autograd's own
  };

  // An argument that a call does not keep: of its values the forward reads what saved[saved] has of
  // them, in the sizes of the argument or of the one part that is read, and no more.
  struct Rebuilt {
    // Elements of the argument, as `as_strided` counts from its first one.
    struct Part {
      std::vector<std::int64_t> sizes;
      std::vector<std::int64_t> strides;
      std::int64_t offset = 0;
    };
    std::size_t input = 0;
    std::size_t saved = 0;
    std::optional<Part> part;
  };

  ModelContainer* backward = nullptr;
  std::string identity;  // of the module
  std::size_t num_answers = 0;
  std::size_t num_made = 0;
  std::vector<Buffer> buffers;
  std::vector<View> views;
  std::vector<Saved> saved;
  std::vector<Tangent> tangents;
  std::vector<std::size_t> outer;  // those with some behind them, each after these
  std::vector<Gradient> gradients;
  // Of a plan for several sizes: those whose strides are the call's (see `with_sizes`).
  std::vector<std::size_t> open;
  std::vector<Rebuilt> rebuilt;      // in the order of the arguments
  std::vector<std::size_t> without;  // these arguments' numbers among the call's, as ordered
  std::vector<ModuleNoise> noise;    // the forward's last inputs
  bool draws = false;                // random numbers in the forward itself
  // The masks are not kept until the backward, which draws them once more: as the recomputation of
  // what the forward has under torch.utils.checkpoint.
  bool redraws = false;
  // Of each tensor of the answer, whether the module's own backward keeps it.
  std::vector<bool> keeps_output;
};

// Reads what worker/modules/training.py wrote. `num_inputs` and `num_outputs` are the forward's.
// Throws std::invalid_argument when the numbers do not fit together.
std::unique_ptr<const ModuleTraining> read_training_plan(const pybind11::dict& plan,
                                                         std::size_t num_inputs,
                                                         std::size_t num_outputs,
                                                         ModelContainer* backward);

// How many sizes and strides a plan has that change with the sizes of a call: those of what is
// saved, of the tangents that are read, of the gradients `open`, and of the masks, in this order
// and the sizes of each before its strides (TrainingGraphs.see_sizes of training_graphs.py).
std::size_t count_sizes(const ModuleTraining& plan);

// The plan for a call where these are the `numbers`.
std::shared_ptr<const ModuleTraining> with_sizes(const ModuleTraining& plan,
                                                 std::span<const std::int64_t> numbers);

}  // namespace eagercache
