#pragma once

// What calling an operator does besides making new tensors: what it writes, and what shares memory
// with its arguments. Found once for an operator, when it is hooked; then never changed.

#include <ATen/core/function_schema.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace eagercache {

// An argument that a call writes.
struct WrittenArgument {
  std::size_t index = 0;  // in the schema
  bool marked = false;    // the schema says so
  // Native moves the version counter of its tensors: what an in-place or out= operator hands back.
  // Others are written behind autograd's back (running statistics).
  bool moves_version = false;
  // The boolean argument without which nothing is written ("training"); empty: every call writes.
  std::string_view when;
};

enum class OutputKind : std::uint8_t {
  kFresh,        // new memory, its contents a function of the arguments
  kArgument,     // the very argument, which the call has written
  kAlias,        // may share memory with an argument
  kOpaque,       // state for the operator's own backward: reserve, workspace, generator state
  kUnspecified,  // contents mean nothing (empty and friends)
  kNotDense,     // a sparse, quantized or otherwise special tensor
};

struct OutputEffect {
  OutputKind kind = OutputKind::kFresh;
  std::vector<std::size_t> arguments;  // kArgument (one), kAlias (those it may share memory with)
};

// Everything that a call of an operator does besides reading its arguments and returning new
// tensors. From the schema, from what PyTorch's SchemaInfo adds to it, and from the rows below,
// because schemas lie. tests/python/programs/test_operator_effects.py compares it with what native
// calls do.
struct OperatorEffects {
  std::vector<WrittenArgument> writes;
  std::vector<OutputEffect> outputs;  // one per return of the schema
  std::vector<std::size_t> opaque_inputs;
  // Native fills the tensors that it makes in place, so that their version counters stand at 1.
  bool moves_fresh = false;
  // What it does outside of its tensors ("it talks to other processes"); empty: nothing.
  std::string_view outside;

  bool writes_arguments() const noexcept { return !writes.empty(); }
  const WrittenArgument* write_of(std::size_t argument) const noexcept;
  // Why a kernel, which reads tensors, writes those of `writes` and makes new ones, cannot stand in
  // for the operator, in one clause; empty when it can.
  std::string refusal(const c10::FunctionSchema& schema) const;
};

// Reads no registry. Works for schemas of any version of torch; rows about others are not used.
OperatorEffects operator_effects(const c10::FunctionSchema& schema);

enum class EffectKind : std::uint8_t {
  kWrites,        // writes `argument`, unmarked, its version counter left alone
  kAliases,       // any output may share memory with `argument`, unmarked
  kOpaqueOutput,  // output number `output`
  kOpaqueInput,   // `argument`
  kUnspecified,   // every output
  kNotDense,      // every output
  kMovesFresh,    // see OperatorEffects::moves_fresh
  kOutside,       // `clause` says what
};

// What the schemas of an operator (all its overloads) do not say.
struct EffectRow {
  std::string_view op;  // "aten::native_batch_norm"
  EffectKind kind;
  std::string_view argument;  // by name; overloads without it are not concerned
  int output = 0;
  std::string_view when;  // kWrites: see WrittenArgument
  std::string_view clause;
};
std::span<const EffectRow> effect_rows() noexcept;

}  // namespace eagercache
