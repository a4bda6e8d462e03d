#include "dispatcher/operators/operator_rules.h"

#include <algorithm>
#include <array>

namespace eagercache {
namespace {

struct Row {
  std::string_view name;
  RuleKind kind;
};

constexpr auto kRules = std::to_array<Row>({
    {"aten::mm", RuleKind::kLibrary},
    {"aten::bmm", RuleKind::kLibrary},
    {"aten::addmm", RuleKind::kLibrary},
    {"aten::_addmm_activation", RuleKind::kLibrary},
    {"aten::baddbmm", RuleKind::kLibrary},
    {"aten::addbmm", RuleKind::kLibrary},
    {"aten::addmv", RuleKind::kLibrary},
    {"aten::addr", RuleKind::kLibrary},
    {"aten::mv", RuleKind::kLibrary},
    {"aten::dot", RuleKind::kLibrary},
    {"aten::vdot", RuleKind::kLibrary},
    {"aten::convolution", RuleKind::kLibrary},
    {"aten::convolution_backward", RuleKind::kLibrary},
    {"aten::convolution_overrideable", RuleKind::kLibrary},
    {"aten::convolution_backward_overrideable", RuleKind::kLibrary},
    {"aten::_convolution", RuleKind::kLibrary},
    {"aten::cudnn_convolution", RuleKind::kLibrary},
    {"aten::cudnn_convolution_transpose", RuleKind::kLibrary},
    {"aten::mkldnn_convolution", RuleKind::kLibrary},
    {"aten::slow_conv3d_forward", RuleKind::kLibrary},
    {"aten::slow_conv_transpose2d", RuleKind::kLibrary},
    {"aten::slow_conv_transpose3d", RuleKind::kLibrary},
    {"aten::_slow_conv2d_forward", RuleKind::kLibrary},
    {"aten::_slow_conv2d_backward", RuleKind::kLibrary},
    {"aten::slow_conv_dilated2d", RuleKind::kLibrary},
    {"aten::slow_conv_dilated3d", RuleKind::kLibrary},
    {"aten::_conv_depthwise2d", RuleKind::kLibrary},
    {"aten::conv_depthwise3d", RuleKind::kLibrary},
    {"aten::linear", RuleKind::kLibrary},
    {"aten::mkldnn_linear", RuleKind::kLibrary},
    {"aten::_scaled_mm", RuleKind::kLibrary},
    {"aten::_grouped_mm", RuleKind::kLibrary},
    {"aten::_weight_int4pack_mm", RuleKind::kLibrary},
    {"aten::_weight_int8pack_mm", RuleKind::kLibrary},
    {"aten::_int_mm", RuleKind::kLibrary},
    {"aten::_trilinear", RuleKind::kLibrary},
    {"aten::_fft_c2c", RuleKind::kLibrary},
    {"aten::_fft_r2c", RuleKind::kLibrary},
    {"aten::_fft_c2r", RuleKind::kLibrary},
    {"aten::div", RuleKind::kIntegerDivision},
    {"aten::floor_divide", RuleKind::kIntegerDivision},
    {"aten::remainder", RuleKind::kIntegerDivision},
    {"aten::fmod", RuleKind::kIntegerDivision},
    {"aten::gcd", RuleKind::kIntegerDivision},
    {"aten::lcm", RuleKind::kIntegerDivision},
    {"aten::pow", RuleKind::kIntegerDivision},  // 0 to a negative power raises for integers
    {"aten::max_pool2d_with_indices_backward", RuleKind::kTrustedPositions},
    {"aten::max_pool3d_with_indices_backward", RuleKind::kTrustedPositions},
    {"aten::adaptive_max_pool2d_backward", RuleKind::kTrustedPositions},
    {"aten::adaptive_max_pool3d_backward", RuleKind::kTrustedPositions},
    {"aten::grid_sampler_2d_backward", RuleKind::kTrustedPositions},
    {"aten::nll_loss_backward", RuleKind::kTrustedPositions},
    {"aten::nll_loss2d_backward", RuleKind::kTrustedPositions},
    {"aten::segment_reduce", RuleKind::kChainedPositions},
    {"aten::_segment_reduce_backward", RuleKind::kChainedPositions},
    // Native itself ends the process: _embedding_bag(randn(10, 4), [1, 2, 3], [0, -2**30]).
    {"aten::_embedding_bag", RuleKind::kChainedPositions},
    {"aten::_embedding_bag_forward_only", RuleKind::kChainedPositions},
    {"aten::_embedding_bag_backward", RuleKind::kChainedPositions},
    {"aten::_embedding_bag_dense_backward", RuleKind::kChainedPositions},
    {"aten::_embedding_bag_per_sample_weights_backward", RuleKind::kChainedPositions},
    // As does _convert_indices_from_csr_to_coo([0, 2**40], [0]), the reverse with ([2**40], 5).
    {"aten::_convert_indices_from_csr_to_coo", RuleKind::kChainedPositions},
    {"aten::_convert_indices_from_coo_to_csr", RuleKind::kChainedPositions},
});

constexpr std::string_view reason_of(RuleKind kind) {
  switch (kind) {
    case RuleKind::kLibrary:
      return "it is a library call (matrix product, convolution, ...)";
    case RuleKind::kIntegerDivision:
      return "integral operands may trap in compiled code";
    case RuleKind::kTrustedPositions:
    case RuleKind::kChainedPositions:
      return "it trusts the positions that it is given, which a proof would have to make up";
  }
  return "";
}

// "aten::div" for "aten::div_" and "aten::_foreach_div_": they compute the same.
bool computes_as(std::string_view name, std::string_view plain) noexcept {
  constexpr std::string_view kNamespace = "aten::";
  constexpr std::string_view kForeach = "_foreach_";
  if (!name.starts_with(kNamespace)) {
    return false;
  }
  name.remove_prefix(kNamespace.size());
  plain.remove_prefix(kNamespace.size());
  if (name.starts_with(kForeach)) {
    name.remove_prefix(kForeach.size());
  }
  return name == plain || (name.ends_with('_') && name.substr(0, name.size() - 1) == plain);
}

}  // namespace

std::optional<OperatorRule> find_operator_rule(std::string_view name) noexcept {
  if (name.starts_with("aten::linalg_") && name != "aten::linalg_vector_norm") {
    return OperatorRule{RuleKind::kLibrary, reason_of(RuleKind::kLibrary)};
  }
  const auto* row = std::find_if(kRules.begin(), kRules.end(),
                                 [name](const Row& each) { return computes_as(name, each.name); });
  if (row == kRules.end()) {
    return std::nullopt;
  }
  return OperatorRule{row->kind, reason_of(row->kind)};
}

}  // namespace eagercache
