#include "python_hooks/bindings/explain_binding.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dispatcher/observe/explain.h"
#include "dispatcher/operators/denied_operators.h"
#include "dispatcher/operators/operator_effects.h"
#include "dispatcher/runtime/runtime.h"
#include "python_hooks/bindings/without_gil.h"

namespace eagercache {
namespace {

namespace py = pybind11;

std::string_view kind_name(OutputKind kind) {
  switch (kind) {
    case OutputKind::kFresh:
      return "fresh";
    case OutputKind::kArgument:
      return "argument";
    case OutputKind::kAlias:
      return "alias";
    case OutputKind::kOpaque:
      return "opaque";
    case OutputKind::kUnspecified:
      return "unspecified";
    case OutputKind::kNotDense:
      return "not_dense";
  }
  return "";
}

// {"writes": [{"argument", "marked", "moves_version", "when"}], "outputs": [{"kind", "arguments"}],
// "opaque_inputs": [names], "outside", "refusal"}
py::dict effects_of(const std::string& op, const std::string& overload) {
  const auto handle = c10::Dispatcher::singleton().findSchema({op, overload});
  if (!handle) {
    throw py::key_error("there is no operator " + op + (overload.empty() ? "" : "." + overload));
  }
  const c10::FunctionSchema& schema = handle->schema();
  const OperatorEffects effects = operator_effects(schema);
  const auto name = [&schema](std::size_t index) {
    return py::str(schema.arguments()[index].name());
  };
  py::list writes;
  for (const WrittenArgument& write : effects.writes) {
    py::dict row;
    row["argument"] = name(write.index);
    row["marked"] = write.marked;
    row["moves_version"] = write.moves_version;
    row["when"] = std::string(write.when);
    writes.append(row);
  }
  py::list outputs;
  for (const OutputEffect& output : effects.outputs) {
    py::list arguments;
    for (const std::size_t index : output.arguments) {
      arguments.append(name(index));
    }
    py::dict row;
    row["kind"] = std::string(kind_name(output.kind));
    row["arguments"] = arguments;
    outputs.append(row);
  }
  py::list opaque;
  for (const std::size_t index : effects.opaque_inputs) {
    opaque.append(name(index));
  }
  py::dict result;
  result["writes"] = writes;
  result["outputs"] = outputs;
  result["opaque_inputs"] = opaque;
  result["outside"] = std::string(effects.outside);
  result["refusal"] = effects.refusal(schema);
  return result;
}

py::dict explanation(const CallExplanation& call) {
  py::dict row;
  row["op"] = call.op;
  row["dispatch_key"] = call.dispatch_key;
  row["outcome"] = call.outcome;
  row["reason"] = call.reason;
  row["digest"] = call.digest;
  row["call"] = call.call_json;
  row["difference"] = call.difference;
  row["nearest"] = call.nearest_json;
  row["nearest_state"] = call.nearest_state;
  row["facts"] = call.facts;
  return row;
}

// An Explainer between start() and stop(), which belong on one thread.
class PythonExplainer {
 public:
  void start() { explainer_.emplace(); }
  py::list stop() {
    py::list calls;
    if (explainer_) {
      for (const CallExplanation& call : explainer_->calls()) {
        calls.append(explanation(call));
      }
      explainer_.reset();
    }
    return calls;
  }

 private:
  std::optional<Explainer> explainer_;
};

// (name, overload, dispatch key, [(digest, decision, native_ns, kernel_ns)]) of each hook that has
// any.
py::list outcomes() {
  py::list rows;
  for (const OperatorHook* hook : Runtime::instance().hooks()) {
    std::vector<VerdictOutcome> all;
    {
      const WithoutGil no_gil;  // the lock's holder may be copying
      all = Runtime::instance().outcomes(*hook);
    }
    py::list keys;
    for (const VerdictOutcome& one : all) {
      keys.append(py::make_tuple(one.digest, one.decision, one.native_ns, one.kernel_ns));
    }
    if (!all.empty()) {
      rows.append(py::make_tuple(hook->name(), hook->overload(),
                                 c10::toString(hook->dispatch_key()), keys));
    }
  }
  return rows;
}

}  // namespace

void bind_explain(py::module_& module) {
  module.def("outcomes", &outcomes);
  module.def("operator_effects", &effects_of, py::arg("op"), py::arg("overload"));
  module.def(
      "denial",
      [](const std::string& op, const std::string& dispatch_key,
         const std::vector<std::string>& dtypes) { return denial(op, dispatch_key, dtypes); },
      py::arg("op"), py::arg("dispatch_key"), py::arg("dtypes"));
  py::class_<PythonExplainer>(module, "Explainer")
      .def(py::init<>())
      .def("start", &PythonExplainer::start)
      .def("stop", &PythonExplainer::stop);
}

}  // namespace eagercache
