#include "dispatcher/plans/contract.h"

#include <nlohmann/json.hpp>

namespace eagercache {
namespace {

// The plan as the object knew it.
std::string plan_of(const KernelForm& form) {
  // Of a cubin's form its number is a part.
  if (form.form != "shapes" && !form.form.starts_with("cuda_shapes ")) {
    return form.launch_plan;
  }
  nlohmann::json plan = nlohmann::json::parse(form.launch_plan, nullptr, false);
  if (!plan.is_object()) {
    return form.launch_plan;
  }
  plan["choice"] = nlohmann::json::array();
  return plan.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

Digest contract_of(const Digest& key, const KernelForm& form,
                   const std::vector<std::string>& cpu_features) {
  std::string text = "key " + key.hex() + "\nform " + form.form + "\nplan " + plan_of(form) +
                     "\nstrides " + form.output_strides + "\ncpu ";
  for (const std::string& feature : cpu_features) {
    text += (&feature == &cpu_features.front() ? "" : " ") + feature;
  }
  return sha256(text + "\n");
}

std::string made_for(const void* symbol) {
  return symbol == nullptr ? std::string() : std::string(static_cast<const char*>(symbol));
}

std::string cubin_made_for(std::string_view cubin) {
  const std::string head = std::string("\n") + kMadeForSymbol + "\n";
  if (cubin.size() < head.size() + kContractLine) {
    return {};
  }
  const std::string_view tail = cubin.substr(cubin.size() - head.size() - kContractLine);
  return tail.starts_with(head) ? std::string(tail.substr(head.size())) : std::string();
}

Status check_contract(std::string_view text, const Digest& contract) {
  const std::string line = contract.hex();
  for (std::size_t begin = 0; begin + line.size() < text.size(); begin += line.size() + 1) {
    if (text[begin + line.size()] != '\n') break;
    if (text.substr(begin, line.size()) == line) {
      return Status::ok();
    }
  }
  return {StatusCode::kCorrupt,
          "the entry says of its object how to call it, and the object says that it was made for "
          "another entry or to be called otherwise"};
}

}  // namespace eagercache
