#pragma once

// What this process knows of one module: its guard, and a kernel or a decision for each form of
// call. The registry (call.h) owns records; kernels are never destroyed, since threads may be
// inside them while the process exits. Under the GIL.

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dispatcher/hook/call_trials.h"
#include "dispatcher/kernels/model_container.h"
#include "dispatcher/kernels/profile_event.h"
#include "python_hooks/nn_modules/arguments.h"
#include "python_hooks/nn_modules/guard.h"
#include "python_hooks/nn_modules/noise.h"
#include "python_hooks/nn_modules/replays.h"
#include "python_hooks/nn_modules/shape_class.h"

namespace eagercache {

// A function beside a kernel with symbolic sizes, made of Inductor's own text. `sizes`: the open
// sizes of the call's tensors, in order. 0 when the kernel holds for them; `strides` then gets the
// strides of all outputs, one after the other, and the sizes of the plan of a kernel for training.
// Has no state and does not throw.
using ModuleShapeFunction = std::int32_t (*)(const std::int64_t* sizes, std::int64_t* strides);

struct ModuleTraining;  // python_hooks/nn_modules/training/training_plan.h

// A whole module compiled into one container, and how a call's tensors reach it. Shared by all
// modules with the same key; never destroyed.
struct ModuleKernel {
  // Where an input of the container comes from.
  struct Input {
    bool from_module = false;  // a slot of the guard; else a tensor among the arguments
    std::size_t index = 0;

    bool operator==(const Input&) const = default;
  };
  // An integer tensor whose values the container uses as indices: outside [low, high), but for
  // `also`, the forward of the module answers, and raises what it raises.
  struct IndexRange {
    std::size_t input = 0;  // index into `inputs`
    std::int64_t low = 0;
    std::int64_t high = 0;
    std::int64_t also = 0;  // `low` where there is none
  };

  // A tensor that the container writes into, as the forward does: of an object among the
  // arguments, or a buffer of the module.
  struct Write {
    std::size_t input = 0;    // index into `inputs`
    std::uint32_t times = 0;  // by as much the forward moves the version counter
  };

  ModelContainer* model = nullptr;
  std::string digest;  // of its entry; empty where it is of no store
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  std::vector<Input> inputs;
  std::vector<IndexRange> ranges;
  std::vector<Write> writes;
  std::vector<ModuleNoise> noise;  // behind the inputs, in calls without gradients
  bool checks = false;  // its last output says whether it indexed nothing that is not there
  std::vector<std::vector<std::int64_t>> output_strides;
  ModuleShapeFunction shape = nullptr;  // of a kernel with symbolic sizes
  // Called with the list of output tensors; none: there is one output, which is the answer.
  pybind11::object unflatten;
  // It is called with a tuple of the call's objects too, and gives them what the forward would
  // have.
  bool takes_objects = false;
  // Behind the objects it is given these modules of the guard, whose attributes it assigns, and
  // these tensors among the arguments, which it assigns to some.
  std::vector<std::size_t> stores;
  std::vector<std::size_t> given;
  // For calls that need gradients; null for others. Never destroyed.
  const ModuleTraining* training = nullptr;
  std::size_t num_plan_sizes = 0;  // of its plan; `shape` gives them behind the strides
  ModuleReplays replays;           // of calls without gradients on a GPU
  // Its calls, and after how many of them one is timed (call_trials.h).
  std::uint64_t calls = 0;
  std::uint64_t trial_at = call_trials::kApart;
  bool warmed = false;  // its forward has just answered, untimed
  // Replicas of a data-parallel job have it or not, and it does not give the forward's very bits:
  // where they compute from equal data the forward answers (numerics_rule.h).
  bool differs_on_replicas = false;
};

// One form of call (argument metadata and values) of one module.
struct ModuleVariant {
  enum class State : std::uint8_t { kPending, kNative, kKernel };
  std::vector<Word> words;
  State state = State::kPending;
  std::uint32_t calls = 0;
  ModuleKernel* kernel = nullptr;
};

// What is known of one module object. Guarded by the GIL; lives until the module dies.
class ModuleRecord {
 public:
  enum class State : std::uint8_t {
    kNew,      // met; the Python side has not looked at it yet
    kWatched,  // its guard is set
    kRefused,  // its own forward answers, and modules below it are looked at by themselves
  };

  explicit ModuleRecord(PyObject* object) : module(object) {}

  // Forms of call under the identity that holds now; nullptr until there is one.
  using Variants = std::list<ModuleVariant>;
  ModuleVariant* find(std::span<const Word> words) noexcept;
  // nullptr when too many forms are known.
  ModuleVariant* add(std::span<const Word> words);
  void use_identity(const std::string& identity);
  // Keeps the guard that holds now for when the module is again what it was, as one that is
  // switched between training and evaluation: to be called before another guard takes its place.
  // Without an effect where `next` has other modules, which would live on, or the guard needs to be
  // told of writes.
  void keep_guard(const ModuleGuard& next);
  // Whether the module is again what the kept guard says, which then holds; fills `requires_grad`.
  bool takes_back(bool* requires_grad) noexcept;
  // Forgets the forms of all identities, and what their kernels read: to be called before
  // use_identity().
  void forget_forms();
  // The verdict on a form under an identity that may not be the one that holds now; a null kernel
  // means the module's own forward.
  void install(const std::string& identity, std::span<const Word> words, ModuleKernel* kernel);

  // Throws std::invalid_argument when the kernel asks for a tensor that the module does not have.
  void require_tensors_of(const ModuleKernel& kernel) const;
  // Gives the identity a kernel with symbolic sizes; one that it has is not taken twice.
  void install_class(const std::string& identity, std::unique_ptr<ModuleShapeClass> shape_class);
  // The first class of the identity that holds now to admit such a call, and how its tensors are
  // laid out; nullptr when there is none. `chosen`: whether its kernel was faster at such sizes.
  ModuleShapeClass* find_class(std::span<const Word> words, ModuleShapeClass::Layout& layout,
                               bool* chosen) const;
  // That kernel answers no more, nor another of the same entry: it failed, or was wrong. The
  // forward does. Whether any was there.
  bool drop(const ModuleKernel& kernel) noexcept;
  // The kernels of the identity that holds now.
  std::vector<const ModuleKernel*> kernels() const;

  // Begins the event of a hit where a profiler listens; without one `event` stays empty. `form` has
  // the call's tensors, and `name` is the handler that names the module (call.h), which is asked
  // once.
  void begin_event(std::optional<ProfileEvent>& event, const ModuleKernel& kernel,
                   const ModuleCallForm& form, const pybind11::object& name) noexcept;

  // Something below the module changed: its forward answers until the Python side has looked again.
  void invalidate() noexcept {
    ++version;
    valid = false;
  }

  // The same for a value that a forward reads.
  void note_values_changed() noexcept {
    values_changed = true;
    ++values_changes;
    invalidate();
  }

  // Whether its forward answers such calls from now on; see `left`.
  void leave(bool gradients, bool leaves) noexcept {
    bool& is_left = left[gradients ? 1 : 0];
    if (!gradients && leaves) {
      forms_to_try -= is_left && forms_to_try > 0 ? 1 : 0;
      calls_since_left = 0;
    }
    is_left = leaves;
  }

  static constexpr unsigned kFormsToTry = 2;

  PyObject* const module;  // borrowed; the record goes when it dies
  State state = State::kNew;
  bool valid = false;  // the guard says what the module is
  // Which calls its own forward answers, with those of the modules below it answered by themselves:
  // without gradients, with gradients.
  std::array<bool, 2> left{};
  // A prompt may have no kernel where each token after it has one: a module that is left without
  // gradients has so many other forms of call tried yet, which some of its calls are looked at for.
  unsigned forms_to_try = kFormsToTry;
  unsigned calls_since_left = 0;
  // So many of the next calls that may need gradients are taken for ones that are left.
  unsigned passes = 0;
  // So many calls one after the other made another one of the module, which had no kernel.
  unsigned unsettled = 0;
  bool timed_next = false;    // the next call is timed from its beginning
  bool asked = false;         // the Python side is looking, or has been asked to
  std::uint64_t version = 0;  // of changes noticed
  // How often in a row its guard was set and no call was counted before the next time, as where
  // each call changes the module, and how often no kernel answered any.
  unsigned looks_in_vain = 0;
  unsigned looks_without_hits = 0;
  std::uint64_t counted_before = 0;  // hits, native and pending at the last of them
  std::uint64_t hits_before = 0;
  std::unique_ptr<ModuleGuard> guard;
  std::string guard_identity;  // what the guard says
  // Another one that held before, of another identity, and what that is; null where there is none.
  std::unique_ptr<ModuleGuard> kept_guard;
  std::string kept_identity;
  // What the functions read that the kernels, of whatever form and identity, were traced from.
  std::unique_ptr<ModuleValues> values = std::make_unique<ModuleValues>();
  // By identity: the attributes of modules by which these kernels' guards go on to what `values`
  // compares. An equal object in its place has the module's identity, and nothing inside of it is
  // compared. To be asked before use_identity(): another attribute is noticed by the guard.
  std::map<std::string, ModuleValues> ways;
  bool ways_hold(const std::string& of) const noexcept {
    const auto found = ways.find(of);
    return found == ways.end() || found->second.same();
  }
  bool values_changed = false;       // and so no kernel answers until the Python side has looked
  std::uint64_t values_changes = 0;  // how often that was noticed
  std::uint64_t hits = 0;
  std::uint64_t training_hits = 0;  // of those, with gradients
  std::uint64_t native = 0;
  std::uint64_t pending = 0;
  std::array<std::uint64_t, kModuleAsideCount> aside{};

 private:
  static constexpr std::size_t kMaxVariants = 256;

  using Classes = std::vector<std::unique_ptr<ModuleShapeClass>>;

  const std::string& shown_name(const pybind11::object& name);

  std::string shown_;  // what profiles call it; empty until a profiler has listened
  std::map<std::string, Variants> by_identity_;
  Variants* current_ = nullptr;
  std::map<std::string, Classes> classes_by_identity_;
  Classes* classes_ = nullptr;
};

}  // namespace eagercache
