#include "dispatcher/deployed/program_spec.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "dispatcher/plans/plan_fields.h"

namespace eagercache {
namespace {

using nlohmann::json;

constexpr std::int64_t kProgramVersion = 1;
constexpr std::size_t kMaxProgramTensors = std::size_t{1} << 16;
constexpr std::size_t kMaxAnswerTensors = std::size_t{1} << 10;

Status malformed_program(const char* what) { return malformed_plan("program", what); }

// [{"form": ..., "name": ...}, ...]
bool read_program_tensors(const json& value, std::size_t limit,
                          std::vector<ProgramSpec::Tensor>* tensors) {
  if (!value.is_array() || value.size() > limit) return false;
  for (const json& row : value) {
    if (!has_fields(row, {"form", "name"}) || !row["name"].is_string()) return false;
    auto form = read_plan_output(row["form"]);
    if (!form) return false;
    tensors->push_back({row["name"].get<std::string>(), *std::move(form)});
  }
  return true;
}

// [is a constant, index] at the front of a row.
bool read_program_source(const json& row, std::size_t constants, std::size_t inputs,
                         ProgramSpec::Source* source) {
  if (!row.is_array() || row.size() < 2 || !row[0].is_boolean()) return false;
  source->constant = row[0].get<bool>();
  const std::size_t count = source->constant ? constants : inputs;
  const auto index = read_number(row[1], kMaxProgramTensors);
  if (!index || *index >= count) return false;
  source->index = static_cast<std::size_t>(*index);
  return true;
}

bool read_constant_rows(const json& value, std::size_t constants, std::size_t limit,
                        std::vector<std::size_t>* rows) {
  const auto numbers = read_numbers(value, limit);
  if (!numbers) return false;
  rows->assign(numbers->begin(), numbers->end());
  return std::ranges::all_of(*rows, [&](std::size_t row) { return row < constants; });
}

bool read_index_ranges(const json& value, std::size_t constants, ProgramSpec* spec) {
  if (!value.is_array() || value.size() > kMaxProgramTensors) return false;
  for (const json& row : value) {
    ProgramSpec::IndexRange range;
    if (!read_program_source(row, constants, spec->inputs.size(), &range.of) || row.size() != 4) {
      return false;
    }
    const auto low = read_number(row[2], kMaxPlanBytes);
    const auto high = read_number(row[3], kMaxPlanBytes);
    if (!low || !high) return false;
    range.low = static_cast<std::int64_t>(*low);
    range.high = static_cast<std::int64_t>(*high);
    spec->ranges.push_back(range);
  }
  return true;
}

bool read_open_sizes(const json& value, ProgramSpec* spec) {
  if (!value.is_array() || value.size() > kMaxProgramTensors) return false;
  for (const json& row : value) {
    const auto pair = read_numbers(row, 2);
    if (!pair || pair->size() != 2) return false;
    const auto input = static_cast<std::size_t>((*pair)[0]);
    const auto dimension = static_cast<std::size_t>((*pair)[1]);
    if (input >= spec->inputs.size() || dimension >= spec->inputs[input].form.sizes.size()) {
      return false;
    }
    spec->open.emplace_back(input, dimension);
  }
  return std::ranges::adjacent_find(spec->open, std::greater_equal<>()) == spec->open.end();
}

// Whether the folding function's results are exactly the constants that are called folded.
bool folds_what_is_folded(const ProgramSpec& spec, const std::vector<ConstantForm>& constants) {
  std::vector<bool> made(constants.size(), false);
  for (const std::size_t row : spec.folded) {
    if (!constants[row].folded() || made[row]) return false;
    made[row] = true;
  }
  for (std::size_t row = 0; row < constants.size(); ++row) {
    if (constants[row].folded() != made[row]) return false;
  }
  return std::ranges::none_of(spec.fold_inputs,
                              [&](std::size_t row) { return constants[row].folded(); }) &&
         spec.fold_inputs.empty() == spec.folded.empty();
}

}  // namespace

Result<ProgramSpec> parse_program(std::string_view text,
                                  const std::vector<ConstantForm>& constants) {
  const Result<json> all = read_plan(text, "program", kProgramVersion,
                                     {"fold_inputs", "folded", "in_spec", "inputs", "main", "open",
                                      "out_spec", "outputs", "ranges", "version"});
  if (!all) {
    return all.status();
  }
  const json& fields = all.value();
  ProgramSpec spec;
  if (!read_program_tensors(fields["inputs"], kMaxProgramTensors, &spec.inputs) ||
      !read_program_tensors(fields["outputs"], kMaxAnswerTensors, &spec.outputs) ||
      spec.outputs.empty()) {
    return malformed_program("its inputs or outputs");
  }
  if (!fields["main"].is_array() || fields["main"].size() > kMaxProgramTensors) {
    return malformed_program("its main function");
  }
  for (const json& row : fields["main"]) {
    ProgramSpec::Source source;
    if (!read_program_source(row, constants.size(), spec.inputs.size(), &source) ||
        row.size() != 2) {
      return malformed_program("its main function");
    }
    spec.main.push_back(source);
  }
  if (!read_constant_rows(fields["fold_inputs"], constants.size(), kMaxProgramTensors,
                          &spec.fold_inputs) ||
      !read_constant_rows(fields["folded"], constants.size(), kMaxProgramTensors, &spec.folded) ||
      !folds_what_is_folded(spec, constants)) {
    return malformed_program("its folding function");
  }
  if (!read_index_ranges(fields["ranges"], constants.size(), &spec) ||
      !read_open_sizes(fields["open"], &spec) || !fields["in_spec"].is_string() ||
      !fields["out_spec"].is_string()) {
    return malformed_program("its ranges, open sizes or call");
  }
  spec.in_spec = fields["in_spec"].get<std::string>();
  spec.out_spec = fields["out_spec"].get<std::string>();
  return spec;
}

Result<std::vector<ConstantForm>> described_constants(
    const std::vector<ArtifactConstant>& constants) {
  std::vector<ConstantForm> forms;
  for (const ArtifactConstant& constant : constants) {
    // As a plan's text, so that the same rules hold.
    auto form = read_plan_output(
        {{"dtype", constant.dtype}, {"sizes", constant.sizes}, {"strides", constant.strides}});
    if (!form) {
      return Status(StatusCode::kCorrupt,
                    "the constant " + constant.names.front() + " is no tensor that can be stored");
    }
    forms.push_back({constant.names, constant.kind, *std::move(form)});
  }
  return forms;
}

Result<std::vector<ConstantForm>> constant_forms(const ArtifactHeader& header) {
  Result<std::vector<ConstantForm>> forms = described_constants(header.constants);
  for (std::size_t i = 0; forms && i < forms->size(); ++i) {
    if (extent_bytes(forms.value()[i].form) != header.constants[i].data.bytes) {
      return Status(StatusCode::kCorrupt, "the constant " + header.constants[i].names.front() +
                                              " of the artifact has another size than its data");
    }
  }
  return forms;
}

std::string sizes_text(at::IntArrayRef numbers) {
  std::ostringstream text;
  text << numbers;
  return text.str();
}

std::uint64_t extent_bytes(const LaunchPlan::Output& form) noexcept {
  std::uint64_t last = 0;
  for (std::size_t i = 0; i < form.sizes.size(); ++i) {
    last += static_cast<std::uint64_t>((form.sizes[i] - 1) * form.strides[i]);
  }
  return (last + 1) * c10::elementSize(form.dtype);
}

}  // namespace eagercache
