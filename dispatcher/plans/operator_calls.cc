#include "dispatcher/plans/operator_calls.h"

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/PyInterpreterHooks.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "dispatcher/plans/plan_fields.h"

namespace eagercache {
namespace {

using nlohmann::json;

std::atomic<std::uint64_t> epoch{1};

// An operator that is taken out and defined again may be another one, at the same address.
class EpochListener : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle& /*op*/) override { ++epoch; }
  void onOperatorDeregistered(const c10::OperatorHandle& /*op*/) override { ++epoch; }
};

// A number that changes whenever an operator is defined or taken out.
std::uint64_t operator_epoch() {
  static const auto* const listening = new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<EpochListener>()));
  static_cast<void>(listening);
  return epoch.load(std::memory_order_acquire);
}

thread_local std::exception_ptr raised;
thread_local bool callers_grad_mode = false;

at::Tensor& tensor_of(AtenTensorHandle handle) { return *reinterpret_cast<at::Tensor*>(handle); }

double read_float(const json& text) {
  return std::strtod(text.get<std::string>().c_str(), nullptr);  // hexadecimal: all bits
}

template <typename T>
c10::IValue list_of(const json& values) {
  c10::List<T> list;
  for (const json& value : values) {
    if constexpr (std::is_same_v<T, double>) {
      list.push_back(read_float(value));
    } else {
      list.push_back(value.get<T>());
    }
  }
  return list;
}

// A value that is no tensor: an object of one field, which names its type.
c10::IValue value_of(const std::string& kind, const json& value) {
  if (kind == "none") return {};
  if (kind == "bool") return value.get<bool>();
  if (kind == "int") return value.get<std::int64_t>();
  if (kind == "float") return read_float(value);
  if (kind == "string") return value.get<std::string>();
  if (kind == "ints") return list_of<std::int64_t>(value);
  if (kind == "floats") return list_of<double>(value);
  if (kind == "bools") return list_of<bool>(value);
  if (kind == "strings") return list_of<std::string>(value);
  if (kind == "device") return c10::Device(value.get<std::string>());
  if (kind == "dtype") {
    const auto dtype = dtype_by_name(value.get<std::string>());
    if (dtype) return static_cast<std::int64_t>(*dtype);
  }
  throw std::invalid_argument("an argument of an operator is a " + kind);
}

void fail(const std::string& name, const char* what) {
  throw std::runtime_error("the operator " + name + " " + what);
}

// How many hold an object of C++, or the Python object around it. That one, where there is any,
// holds the first and is held by it.
std::size_t holders(const c10::impl::PyObjectSlot* slot, std::size_t uses) {
  PyObject* const around = slot->load_pyobj();
  return around == nullptr ? uses
                           : uses - 1 + (*c10::impl::getGlobalPyInterpreter())->refcnt(around) - 1;
}

std::size_t holders(const at::Tensor& tensor) {
  return holders(tensor.unsafeGetTensorImpl()->pyobj_slot(), tensor.use_count());
}

std::size_t holders_of_memory(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  return holders(storage.unsafeGetStorageImpl()->pyobj_slot(), storage.use_count());
}

// What the operator might have done to tensors that are the container's, as it was before.
struct Held {
  explicit Held(const at::Tensor& given)
      : tensor(&given),
        uses(holders(given)),
        storages(holders_of_memory(given)),
        version(given.is_inference() ? 0 : given._version()) {}

  bool is_kept() const { return holders(*tensor) > uses || holders_of_memory(*tensor) > storages; }
  bool is_written() const { return !tensor->is_inference() && tensor->_version() != version; }

  const at::Tensor* tensor;
  std::size_t uses, storages;
  std::uint32_t version;
};

using Answers = c10::SmallVector<at::Tensor, 4>;

Answers take_answers(std::vector<c10::IValue>& stack, const std::string& name) {
  Answers answers;
  for (c10::IValue& value : stack) {
    if (value.isTensor()) {
      answers.push_back(std::move(value).toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        answers.push_back(tensor);
      }
    } else {
      fail(name, "returned something else than tensors");
    }
  }
  stack.clear();
  return answers;
}

// Whether a container may go on with a tensor as with one that it made itself.
bool is_own(const at::Tensor& tensor, c10::Device device) {
  return tensor.defined() && tensor.device() == device && tensor.layout() == at::kStrided &&
         !tensor.requires_grad() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch() && holders(tensor) == 1 &&
         holders_of_memory(tensor) == 1 &&
         (device.is_cpu() || reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 16 == 0);
}

}  // namespace

CallersGradMode::CallersGradMode() noexcept : before_(callers_grad_mode) {
  callers_grad_mode = at::GradMode::is_enabled();
}

CallersGradMode::~CallersGradMode() { callers_grad_mode = before_; }

bool CallersGradMode::enabled() noexcept { return callers_grad_mode; }

std::exception_ptr OperatorCalls::take_raised() noexcept { return std::exchange(raised, nullptr); }

bool OperatorCalls::has_raised() noexcept { return raised != nullptr; }

Result<std::unique_ptr<OperatorCalls>> OperatorCalls::parse(const char* text) {
  try {
    auto made = std::make_unique<OperatorCalls>();
    const json read = json::parse(text);
    for (const json& call : read) {
      made->calls_.push_back(read_call(&call));
    }
    return made;
  } catch (const std::exception& error) {
    return Status(StatusCode::kIncompatible,
                  std::string("its calls of operators are not understood: ") + error.what());
  }
}

OperatorCalls::Call OperatorCalls::read_call(const void* text) {
  const json& all = *static_cast<const json*>(text);
  Call call;
  all.at("name").get_to(call.name);
  all.at("overload").get_to(call.overload);
  all.at("schema").get_to(call.schema);
  all.at("made_here").get_to(call.made_here);
  all.at("tensors").get_to(call.num_tensors);
  for (const json& argument : all.at("arguments")) {
    call.arguments.push_back(read_argument(&argument));
    for (const int place : call.arguments.back().places) {
      TORCH_CHECK(place < static_cast<int>(call.num_tensors));
    }
  }
  for (const json& output : all.at("outputs")) {
    const auto dtype = dtype_by_name(output.at("dtype").get<std::string>());
    TORCH_CHECK(dtype);
    call.outputs.push_back({*dtype, output.at("sizes"), output.at("strides")});
  }
  return call;
}

OperatorCalls::Argument OperatorCalls::read_argument(const void* text) {
  const json& all = *static_cast<const json*>(text);
  const auto field = all.begin();  // of an object: the only one
  const std::string& kind = field.key();
  const json& value = field.value();
  if (kind == "tensor") {
    return {Argument::Kind::kTensor, {value.get<int>()}, {}};
  }
  if (kind == "tensors" || kind == "optional_tensors") {
    return {kind == "tensors" ? Argument::Kind::kTensors : Argument::Kind::kOptionalTensors,
            value.get<std::vector<int>>(),
            {}};
  }
  return {Argument::Kind::kValue, {}, value_of(kind, value)};
}

c10::OperatorHandle OperatorCalls::find(std::size_t index) {
  const std::uint64_t now = operator_epoch();
  const Lock lock(mutex_);
  if (found_at_ != now) {
    found_.clear();
    for (const Call& call : calls_) {
      const auto found =
          c10::Dispatcher::singleton().findSchema({call.name.c_str(), call.overload.c_str()});
      if (!found) {
        fail(call.name, "is not defined");
      }
      std::ostringstream schema;
      schema << found->schema();
      if (schema.str() != call.schema) {
        fail(call.name, "is another one");
      }
      found_.push_back(*found);
    }
    found_at_ = now;
  }
  return found_.at(index);
}

std::vector<c10::IValue> OperatorCalls::stack_of(const Call& call,
                                                 std::span<AtenTensorHandle> tensors) {
  std::vector<c10::IValue> stack;
  for (const Argument& argument : call.arguments) {
    if (argument.kind == Argument::Kind::kValue) {
      stack.emplace_back(argument.value.isList() ? argument.value.deepcopy() : argument.value);
    } else if (argument.kind == Argument::Kind::kTensor) {
      stack.emplace_back(tensor_of(tensors[argument.places[0]]));
    } else if (argument.kind == Argument::Kind::kTensors) {
      c10::List<at::Tensor> list;
      for (const int place : argument.places) {
        list.push_back(tensor_of(tensors[place]));
      }
      stack.emplace_back(std::move(list));
    } else {
      c10::List<std::optional<at::Tensor>> list;
      for (const int place : argument.places) {
        list.push_back(place < 0 ? std::optional<at::Tensor>() : tensor_of(tensors[place]));
      }
      stack.emplace_back(std::move(list));
    }
  }
  return stack;
}

void OperatorCalls::call_function(int index, int /*num_ints*/, std::int64_t* /*ints*/,
                                  int num_tensors, AtenTensorHandle* tensors) {
  const Call& call = calls_.at(static_cast<std::size_t>(index));
  const std::span<AtenTensorHandle> all(tensors, static_cast<std::size_t>(num_tensors));
  TORCH_CHECK(call.num_tensors != 0 && all.size() == call.num_tensors + call.outputs.size());
  const c10::Device device = tensor_of(all[0]).device();
  c10::SmallVector<Held, 8> held;
  for (const int place : call.made_here) {
    held.emplace_back(tensor_of(all[place]));
  }
  std::vector<c10::IValue> stack = stack_of(call, all);
  const c10::OperatorHandle op = find(static_cast<std::size_t>(index));
  try {
    const at::AutoGradMode mode(CallersGradMode::enabled());
    op.callBoxed(stack);
  } catch (...) {
    raised = std::current_exception();
    throw;
  }
  Answers answers = take_answers(stack, call.name);
  if (answers.size() != call.outputs.size()) {
    fail(call.name, "returned another number of tensors");
  }
  for (const Held& one : held) {
    if (one.is_kept() || one.is_written()) {
      fail(call.name, "keeps or writes a tensor that it was given");
    }
  }
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const Output& output = call.outputs[i];
    const at::Tensor& answer = answers[i];
    if (!is_own(answer, device) || answer.scalar_type() != output.dtype ||
        answer.sizes() != output.sizes || answer.strides() != output.strides) {
      fail(call.name, "returned another tensor than it said when it was traced");
    }
    tensor_of(all[call.num_tensors + i]) = std::move(answers[i]);
  }
}

}  // namespace eagercache
