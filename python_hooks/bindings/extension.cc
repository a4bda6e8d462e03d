// The Python module eagercache._C: thin bindings over the dispatcher and the store. Everything that
// can block lets go of the GIL.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dispatcher/autograd/function_autograd.h"
#include "dispatcher/base/log.h"
#include "dispatcher/base/source_digest.h"
#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/hook/inside_guard.h"
#include "dispatcher/kernels/cuda_kernel.h"
#include "dispatcher/observe/probe.h"
#include "dispatcher/observe/verification.h"
#include "dispatcher/operators/default_operators.h"
#include "dispatcher/runtime/runtime.h"
#include "kernel_cache/base/cpu_features.h"
#include "kernel_cache/base/digest.h"
#include "kernel_cache/loading/shared_library.h"
#include "python_hooks/bindings/bundle_binding.h"
#include "python_hooks/bindings/deploy_binding.h"
#include "python_hooks/bindings/explain_binding.h"
#include "python_hooks/bindings/module_binding.h"
#include "python_hooks/bindings/python_miss_handler.h"
#include "python_hooks/bindings/record_binding.h"
#include "python_hooks/bindings/store_binding.h"
#include "python_hooks/bindings/without_gil.h"

namespace eagercache {
namespace {

namespace py = pybind11;

OperatorHook& require_hook(const std::string& op, const std::string& overload,
                           const std::string& dispatch_key) {
  OperatorHook* hook = Runtime::instance().find_hook(op, overload, dispatch_key);
  if (hook == nullptr) {
    throw py::key_error(op + "." + overload + " is not registered at " + dispatch_key);
  }
  return *hook;
}

void register_operator(const std::string& op, const std::string& overload,
                       const std::string& dispatch_key) {
  const Status status = [&] {
    // Registering may destroy Python objects of the dispatcher's caches, so the GIL stays held; it
    // takes microseconds.
    return Runtime::instance().register_operator(op, overload, dispatch_key).status();
  }();
  if (!status) {
    throw py::value_error(status.message());
  }
}

// (eligible, composite, reason) of an operator, without touching it.
py::tuple eligibility(const std::string& op, const std::string& overload,
                      const std::string& dispatch_key) {
  const auto handle = c10::Dispatcher::singleton().findSchema({op, overload});
  if (!handle) {
    throw py::key_error("there is no operator " + op + (overload.empty() ? "" : "." + overload));
  }
  const Eligibility result = check_eligibility(*handle, c10::parseDispatchKey(dispatch_key));
  return py::make_tuple(result.eligible, result.composite, result.reason);
}

std::vector<std::pair<std::string, std::string>> eligible_operators(
    const std::string& dispatch_key) {
  const c10::DispatchKey key = c10::parseDispatchKey(dispatch_key);
  std::vector<std::pair<std::string, std::string>> names;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (op && check_eligibility(*op, key).eligible) {
      names.emplace_back(name.name, name.overload_name);
    }
  }
  return names;
}

// The default operators that this torch has and that are eligible at `dispatch_key`.
std::vector<std::pair<std::string, std::string>> default_names(const std::string& dispatch_key) {
  const c10::DispatchKey key = c10::parseDispatchKey(dispatch_key);
  std::vector<std::pair<std::string, std::string>> names;
  const auto add = [&](std::span<const std::string_view> list) {
    for (const std::string_view text : list) {
      const std::size_t dot = text.find('.');
      const std::string name(text.substr(0, dot));
      const std::string overload(dot == std::string_view::npos ? "" : text.substr(dot + 1));
      const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
      if (op && check_eligibility(*op, key).eligible) {
        names.emplace_back(name, overload);
      }
    }
  };
  add(default_operators());
  if (key == c10::DispatchKey::CUDA) {
    add(more_default_operators_on_cuda());
  }
  return names;
}

// Overloads of one operator name, as the dispatcher knows them.
std::vector<std::string> overloads_of(const std::string& op) {
  std::vector<std::string> overloads;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name == op && c10::Dispatcher::singleton().findSchema(name)) {
      overloads.push_back(name.overload_name);
    }
  }
  return overloads;
}

py::list operator_stats() {
  py::list rows;
  for (const OperatorHook* hook : Runtime::instance().hooks()) {
    const CallCounts counts = read_counts(hook->index());
    const auto of = [&counts](CallOutcome outcome) {
      return counts.outcomes[static_cast<std::size_t>(outcome)];
    };
    py::dict aside;
    for (std::size_t i = 0; i < kAsideReasonCount; ++i) {
      if (counts.aside[i] != 0) {
        aside[py::str(std::string(aside_reason_name(static_cast<AsideReason>(i))))] =
            counts.aside[i];
      }
    }
    py::dict row;
    row["op"] = hook->full_name();
    row["dispatch_key"] = c10::toString(hook->dispatch_key());
    row["active"] = hook->wanted();
    row["hits"] = of(CallOutcome::kHit);
    row["misses"] = of(CallOutcome::kMiss);
    row["pending"] = of(CallOutcome::kPending);
    row["native"] = of(CallOutcome::kNative);
    row["aside"] = of(CallOutcome::kAside);
    row["aside_reasons"] = aside;
    row["shadowed"] = hook->is_shadowed();
    rows.append(row);
  }
  return rows;
}

py::list verdicts() {
  py::list rows;
  for (const OperatorHook* hook : Runtime::instance().hooks()) {
    for (const VerdictRecord& verdict : Runtime::instance().verdicts(*hook)) {
      py::dict row;
      row["op"] = hook->name();
      row["overload"] = hook->overload();
      row["dispatch_key"] = c10::toString(hook->dispatch_key());
      row["digest"] = verdict.digest;
      row["call"] = verdict.call_json;
      row["decision"] = verdict.decision;
      row["reason"] = verdict.reason;
      row["facts"] = verdict.facts;
      rows.append(row);
    }
  }
  return rows;
}

template <typename Enum>
Enum parse_choice(const std::string& text, const std::vector<std::pair<const char*, Enum>>& names,
                  const char* what) {
  std::string allowed;
  for (const auto& [name, value] : names) {
    if (text == name) {
      return value;
    }
    allowed += (allowed.empty() ? "" : ", ") + std::string(name);
  }
  throw py::value_error(std::string(what) + " is '" + text + "'; it must be one of " + allowed);
}

void set_policy(const std::string& on_miss, const std::string& choose, const std::string& numerics,
                std::uint16_t compile_after, bool replicas, bool shape_classes, bool trials) {
  Policy policy;
  policy.on_miss = parse_choice<OnMiss>(
      on_miss,
      {{"background", OnMiss::kBackground}, {"wait", OnMiss::kWait}, {"native", OnMiss::kNative}},
      "on_miss");
  policy.choose = parse_choice<Choose>(
      choose, {{"faster", Choose::kFaster}, {"always", Choose::kAlways}}, "choose");
  policy.numerics = parse_choice<Numerics>(
      numerics, {{"accurate", Numerics::kAccurate}, {"bitwise", Numerics::kBitwise}}, "numerics");
  policy.compile_after = compile_after;
  policy.replicas = replicas;
  policy.shape_classes = shape_classes;
  policy.trials = trials;
  Runtime::instance().set_policy(policy);
}

void bind_operators(py::module_& module) {
  module.def("register", &register_operator, py::arg("op"), py::arg("overload"),
             py::arg("dispatch_key"));
  module.def("eligibility", &eligibility, py::arg("op"), py::arg("overload"),
             py::arg("dispatch_key"));
  module.def("eligible_operators", &eligible_operators, py::arg("dispatch_key"));
  module.def("overloads_of", &overloads_of, py::arg("op"));
  module.def("default_operators", &default_names, py::arg("dispatch_key"));
  module.def(
      "set_identity",
      [](const std::string& op, const std::string& overload, const std::string& dispatch_key,
         const std::string& identity) {
        Runtime::instance().set_identity(require_hook(op, overload, dispatch_key), identity);
      },
      py::arg("op"), py::arg("overload"), py::arg("dispatch_key"), py::arg("identity"));
  module.def(
      "register_autograd",
      [](const std::string& op, const std::string& dispatch_key, const std::string& backward) {
        const Status status = Runtime::instance().register_autograd(op, dispatch_key, backward);
        if (!status) {
          throw py::value_error(status.message());
        }
      },
      py::arg("op"), py::arg("dispatch_key"), py::arg("backward"));
  module.def("autocast_of_formulas", []() -> py::object {
    const std::optional<AutocastState> state = autocast_of_formulas();
    if (!state || !state->enabled) {
      return py::none();
    }
    return py::make_tuple(c10::DeviceTypeName(state->device, /*lower_case=*/true), state->dtype);
  });
  module.def("set_active",
             [](const std::string& op, const std::string& overload, const std::string& dispatch_key,
                bool active) { require_hook(op, overload, dispatch_key).set_active(active); });
  module.def("active_operators", [] {
    std::vector<std::tuple<std::string, std::string, std::string>> names;
    for (const OperatorHook* hook : Runtime::instance().hooks()) {
      if (hook->wanted()) {
        names.emplace_back(hook->name(), hook->overload(), c10::toString(hook->dispatch_key()));
      }
    }
    return names;
  });
}

// `with native_calls():` our own work with tensors of the program, which is no call of it: native
// answers, nothing is counted, and no kernel is made.
class NativeCalls {
 public:
  void enter() { inside_.emplace(); }
  void exit(const py::args& /*error*/) { inside_.reset(); }

 private:
  std::optional<InsideGuard> inside_;
};

void bind_native_calls(py::module_& module) {
  py::class_<NativeCalls>(module, "native_calls")
      .def(py::init<>())
      .def("__enter__", &NativeCalls::enter)
      .def("__exit__", &NativeCalls::exit);
}

void bind_policy(py::module_& module) {
  module.def("set_policy", &set_policy, py::arg("on_miss"), py::arg("choose"), py::arg("numerics"),
             py::arg("compile_after") = Policy{}.compile_after, py::arg("replicas") = false,
             py::arg("shape_classes") = false, py::arg("trials") = false);
  module.def(
      "set_wait_seconds", [](double seconds) { Runtime::instance().set_wait_seconds(seconds); },
      py::arg("seconds"));
  module.def("set_verification_share", &set_verification_share, py::arg("share"));
  module.def("set_answering",
             [](bool answering) { return Runtime::instance().set_answering(answering); });
  module.def("answering", [] { return hooks_answer.load(); });
  module.def("freeze", [] {
    const WithoutGil no_gil;
    Runtime::instance().freeze();
  });
  module.def("thaw", [] { Runtime::instance().thaw(); });
  module.def("frozen", [] { return Runtime::instance().frozen(); });
  module.def("forked", [] { return Runtime::instance().forked(); });
}

void bind_verdicts(py::module_& module) {
  module.def("set_store", [](std::shared_ptr<DiskStore> store) {
    Runtime::instance().set_store(std::move(store));
  });
  module.def(
      "set_handler",
      [](const py::object& submit, const py::object& put_aside) {
        Runtime::instance().set_handler(
            submit.is_none()
                ? nullptr
                : std::make_shared<PythonMissHandler>(submit.cast<py::function>(), put_aside));
      },
      py::arg("submit"), py::arg("put_aside") = py::none());
  module.def(
      "complete",
      [](const std::string& digest, const std::string& decision, const std::string& reason,
         double cpu_seconds) {
        const WithoutGil no_gil;
        Runtime::instance().complete(digest, decision, reason, cpu_seconds);
      },
      py::arg("digest"), py::arg("decision"), py::arg("reason"), py::arg("cpu_seconds") = 0.0);
  module.def("operator_stats", &operator_stats);
  module.def("verdicts", &verdicts);
  module.def("outstanding", [] { return Runtime::instance().outstanding(); });
  module.def(
      "wait_until_idle",
      [](double seconds) {
        const WithoutGil no_gil;
        return Runtime::instance().wait_until_idle(seconds);
      },
      py::arg("seconds"));
  module.def("shut_down", [] {
    const WithoutGil no_gil;
    Runtime::instance().shut_down();
  });
  module.def("loaded_kernels",
             [] { return SharedLibrary::loaded_count() + CudaKernel::loaded_count(); });
  module.def("set_log_level",
             [](int level) { set_log_level(static_cast<LogLevel>(std::clamp(level, 0, 3))); });
  module.def("host_cpu_features", &host_cpu_features);
  module.def("has_cuda_driver", [] { return CudaDriver::get() != nullptr; });
  module.def("cuda_compute_mode", &cuda_compute_mode, py::arg("device_index"));
}

void bind_probe(py::module_& module) {
  py::class_<Probe, Probe::Owned>(module, "Probe")
      .def(py::init([](const std::string& op, const std::string& overload,
                       const std::string& dispatch_key) {
             return Probe::make(require_hook(op, overload, dispatch_key));
           }),
           py::arg("op"), py::arg("overload"), py::arg("dispatch_key"))
      .def("capture", &Probe::arm_capture)
      .def("force", &Probe::arm_force)
      .def("set_undefined", &Probe::set_undefined, py::arg("arguments"))
      .def_property_readonly("captured", &Probe::captured)
      .def_property_readonly("forced", &Probe::forced)
      .def_property_readonly("error", &Probe::error)
      .def_property_readonly("warning", &Probe::warning)
      .def_property_readonly("aside",
                             [](const Probe& probe) {
                               return probe.aside() == AsideReason::kNone
                                          ? std::string()
                                          : std::string(aside_reason_name(probe.aside()));
                             })
      .def("digest", &Probe::digest, py::arg("choose"))
      .def(
          "load",
          [](Probe& probe, const std::string& path, const std::string& launch_plan) {
            const Status status = [&] {
              const WithoutGil no_gil;
              return probe.load(path, launch_plan);
            }();
            if (!status) {
              throw std::runtime_error(status.to_string());
            }
          },
          py::arg("path"), py::arg("launch_plan") = "")
      .def(
          "load_cubins",
          [](Probe& probe, const std::vector<py::bytes>& objects, const std::string& launch_plan) {
            const std::vector<std::string> copies(objects.begin(), objects.end());
            const Status status = [&] {
              const WithoutGil no_gil;
              return probe.load_cubins(copies, launch_plan);
            }();
            if (!status) {
              throw std::runtime_error(status.to_string());
            }
          },
          py::arg("objects"), py::arg("launch_plan"))
      .def("time", &Probe::time, py::arg("pairs"), py::arg("calls"), py::call_guard<WithoutGil>());
}

}  // namespace
}  // namespace eagercache

PYBIND11_MODULE(_C, module) {
  module.doc() = "C++ core of eagercache: hooks, guard tables, kernel store.";
  if (!eagercache::libcrypto_is_there()) {
    throw py::import_error(
        "eagercache needs OpenSSL's libcrypto.so.3 or libcrypto.so.1.1, which this system does not "
        "have. Install OpenSSL (Debian, Ubuntu: apt-get install libssl3).");
  }
  module.attr("source_digest") = eagercache::source_digest();
  eagercache::bind_store(module);
  eagercache::bind_operators(module);
  eagercache::bind_policy(module);
  eagercache::bind_native_calls(module);
  eagercache::bind_verdicts(module);
  eagercache::bind_probe(module);
  eagercache::bind_explain(module);
  eagercache::bind_record(module);
  eagercache::bind_bundle(module);
  eagercache::bind_modules(module);
  eagercache::bind_deploy(module);
}
