#include "python_hooks/bindings/record_binding.h"

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "dispatcher/observe/recorder.h"
#include "dispatcher/runtime/call_text.h"
#include "dispatcher/runtime/runtime.h"
#include "python_hooks/bindings/without_gil.h"

namespace eagercache {
namespace {

namespace py = pybind11;

// (description, hits) of every recorded key.
std::vector<std::pair<std::string, std::uint64_t>> recorded() {
  const WithoutGil no_gil;
  const std::string policy_tag = Runtime::instance().policy_tag();
  std::vector<std::pair<std::string, std::uint64_t>> rows;
  for (const RecordedCall& call : recorded_calls()) {
    const CallRequest request{.digest = call.hook->entry_digest(call.words, policy_tag).hex(),
                              .calls = call.calls,
                              .native_ns = call.native_ns};
    rows.emplace_back(operator_call_json(*call.hook, call.words, request), call.hits);
  }
  return rows;
}

// A row for each operator and rule by which calls of it stepped aside.
py::list asides() {
  std::vector<RecordedAside> found;
  {
    const WithoutGil no_gil;
    found = recorded_asides();
  }
  py::list rows;
  for (const RecordedAside& aside : found) {
    py::dict row;
    row["op"] = aside.hook->full_name();
    row["dispatch_key"] = std::string(c10::toString(aside.hook->dispatch_key()));
    row["rule"] = std::string(aside_reason_name(aside.reason));
    row["calls"] = aside.calls;
    row["timed"] = aside.timed;
    row["native_ns"] = aside.native_ns;
    rows.append(row);
  }
  return rows;
}

// The store's key of a described call. Hooks the operator, which answers nothing by that.
std::string call_digest(const std::string& op, const std::string& overload,
                        const std::string& dispatch_key, const std::string& description,
                        const std::string& policy_tag) {
  const Result<OperatorHook*> hook =
      Runtime::instance().register_operator(op, overload, dispatch_key);
  if (!hook) {
    throw py::value_error(hook.status().message());
  }
  KeyBuffer key;
  std::string problem;
  DecodedCall call;
  if (!parse_call(description, &key, &problem) || !decode_call(key.words(), &call)) {
    throw py::value_error(problem);
  }
  const std::size_t wanted = hook.value()->plan().names.size();
  if (call.arguments.size() != wanted) {
    throw py::value_error(hook.value()->full_name() + " takes " + std::to_string(wanted) +
                          " arguments, the description has " +
                          std::to_string(call.arguments.size()));
  }
  return hook.value()->entry_digest(key.words(), policy_tag).hex();
}

}  // namespace

void bind_record(py::module_& module) {
  module.def("set_recording", &set_recording);
  module.def("recorded_calls", &recorded);
  module.def("recorded_asides", &asides);
  module.def("forget_recorded_calls", [] {
    const WithoutGil no_gil;
    forget_recorded_calls();
  });
  module.def("lost_calls", &lost_calls);
  module.def("call_digest", &call_digest, py::arg("op"), py::arg("overload"),
             py::arg("dispatch_key"), py::arg("description"), py::arg("choose"));
}

}  // namespace eagercache
