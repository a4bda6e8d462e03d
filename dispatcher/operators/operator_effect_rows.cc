#include <array>

#include "dispatcher/operators/operator_effects.h"

namespace eagercache {
namespace {

constexpr EffectRow writes(std::string_view op, std::string_view argument,
                           std::string_view when = {}) {
  return {op, EffectKind::kWrites, argument, 0, when, {}};
}
constexpr EffectRow aliases(std::string_view op, std::string_view argument) {
  return {op, EffectKind::kAliases, argument, 0, {}, {}};
}
constexpr EffectRow opaque_output(std::string_view op, int output) {
  return {op, EffectKind::kOpaqueOutput, {}, output, {}, {}};
}
constexpr EffectRow opaque_input(std::string_view op, std::string_view argument) {
  return {op, EffectKind::kOpaqueInput, argument, 0, {}, {}};
}
constexpr EffectRow unspecified(std::string_view op) {
  return {op, EffectKind::kUnspecified, {}, 0, {}, {}};
}
constexpr EffectRow not_dense(std::string_view op) {
  return {op, EffectKind::kNotDense, {}, 0, {}, {}};
}
constexpr EffectRow moves_fresh(std::string_view op) {
  return {op, EffectKind::kMovesFresh, {}, 0, {}, {}};
}
constexpr EffectRow outside(std::string_view op, std::string_view clause) {
  return {op, EffectKind::kOutside, {}, 0, {}, clause};
}

constexpr std::string_view kAsserts = "it raises by the values of its arguments";
constexpr std::string_view kReshapes = "it changes more of its argument than the contents";

constexpr auto kRows = std::to_array<EffectRow>({
    // Running statistics. native_batch_norm does not mark them; none moves their version.
    writes("aten::native_batch_norm", "running_mean", "training"),
    writes("aten::native_batch_norm", "running_var", "training"),
    writes("aten::cudnn_batch_norm", "running_mean", "training"),
    writes("aten::cudnn_batch_norm", "running_var", "training"),
    writes("aten::miopen_batch_norm", "running_mean", "training"),
    writes("aten::miopen_batch_norm", "running_var", "training"),
    writes("aten::batch_norm_update_stats", "running_mean"),
    writes("aten::batch_norm_update_stats", "running_var"),
    writes("aten::batch_norm_gather_stats", "running_mean"),
    writes("aten::batch_norm_gather_stats", "running_var"),
    writes("aten::batch_norm_gather_stats_with_counts", "running_mean"),
    writes("aten::batch_norm_gather_stats_with_counts", "running_var"),
    writes("aten::_batch_norm_impl_index", "running_mean", "training"),
    writes("aten::_batch_norm_impl_index", "running_var", "training"),
    // Made and then filled in place.
    moves_fresh("aten::zeros"),
    moves_fresh("aten::ones"),
    moves_fresh("aten::full"),
    moves_fresh("aten::arange"),
    moves_fresh("aten::linspace"),
    moves_fresh("aten::logspace"),
    moves_fresh("aten::eye"),
    // Views that no schema marks.
    aliases("aten::_unsafe_view", "self"),
    aliases("aten::unsafe_split", "self"),
    aliases("aten::unsafe_split_with_sizes", "self"),
    aliases("aten::unsafe_chunk", "self"),
    aliases("aten::lift", "self"),
    aliases("aten::_lazy_clone", "self"),
    // Outputs and arguments that are called reserve, workspace, philox_seed and so on are opaque by
    // their names; these have none, or another.
    opaque_output("aten::_batch_norm_with_update", 3),
    opaque_output("aten::_batch_norm_with_update_functional", 3),
    opaque_output("aten::_batch_norm_no_update", 3),
    opaque_output("aten::_batch_norm_impl_index", 3),
    opaque_output("aten::cudnn_batch_norm", 3),
    opaque_output("aten::miopen_batch_norm", 2),
    opaque_input("aten::miopen_batch_norm_backward", "save_var"),
    opaque_output("aten::_cudnn_rnn", 3),
    opaque_output("aten::_cudnn_rnn", 4),
    opaque_output("aten::miopen_rnn", 3),
    opaque_output("aten::miopen_rnn", 4),
    opaque_output("aten::mkldnn_rnn_layer", 3),
    opaque_output("aten::_thnn_fused_lstm_cell", 2),
    opaque_output("aten::_thnn_fused_gru_cell", 1),
    opaque_output("aten::_scaled_dot_product_flash_attention_for_cpu", 1),
    opaque_input("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "logsumexp"),
    opaque_output("aten::_ctc_loss", 1),
    opaque_input("aten::_ctc_loss_backward", "log_alpha"),
    opaque_output("aten::_cudnn_ctc_loss", 1),
    opaque_output("aten::_cudnn_init_dropout_state", 0),
    // Memory that nobody has written.
    unspecified("aten::empty"),
    unspecified("aten::empty_like"),
    unspecified("aten::empty_strided"),
    unspecified("aten::empty_permuted"),
    unspecified("aten::new_empty"),
    unspecified("aten::new_empty_strided"),
    unspecified("aten::_efficientzerotensor"),
    unspecified("aten::resize"),
    unspecified("aten::resize_as"),
    unspecified("aten::_resize_output"),
    // Results that are no dense tensors.
    not_dense("aten::_to_sparse"),
    not_dense("aten::_to_sparse_csr"),
    not_dense("aten::_to_sparse_csc"),
    not_dense("aten::_to_sparse_bsr"),
    not_dense("aten::_to_sparse_bsc"),
    not_dense("aten::to_mkldnn"),
    not_dense("aten::sparse_coo_tensor"),
    not_dense("aten::sparse_compressed_tensor"),
    not_dense("aten::_sparse_compressed_tensor_with_dims"),
    not_dense("aten::_sparse_broadcast_to_copy"),
    not_dense("aten::_spdiags"),
    not_dense("aten::quantize_per_tensor"),
    not_dense("aten::quantize_per_tensor_dynamic"),
    not_dense("aten::quantize_per_channel"),
    not_dense("aten::_make_per_tensor_quantized_tensor"),
    not_dense("aten::_make_per_channel_quantized_tensor"),
    not_dense("aten::_empty_affine_quantized"),
    not_dense("aten::_empty_per_channel_affine_quantized"),
    not_dense("aten::_nested_tensor_from_mask"),
    not_dense("aten::_nested_tensor_from_tensor_list"),
    not_dense("aten::_nested_from_padded"),
    not_dense("aten::_nested_view_from_buffer_copy"),
    not_dense("aten::_nested_view_from_jagged_copy"),
    // Calls that are made for something else than their result.
    outside("aten::_functional_assert_async", kAsserts),
    outside("aten::_functional_assert_scalar", kAsserts),
    outside("aten::_functional_sym_constrain_range", kAsserts),
    outside("aten::_functional_sym_constrain_range_for_size", kAsserts),
    outside("aten::_make_dep_token", "it orders other calls"),
    outside("aten::_pin_memory", "its result is in pinned memory"),
    outside("aten::from_file", "it reads a file"),
    outside("aten::resize_", kReshapes),
    outside("aten::resize_as_", kReshapes),
    outside("aten::resize_as_sparse_", kReshapes),
    outside("aten::_resize_output_", kReshapes),
    outside("aten::set_", kReshapes),
    outside("aten::sparse_resize_", kReshapes),
    outside("aten::sparse_resize_and_clear_", kReshapes),
    outside("aten::_coalesced_", kReshapes),
    outside("aten::copy_sparse_to_sparse_", kReshapes),
});

}  // namespace

std::span<const EffectRow> effect_rows() noexcept { return kRows; }

}  // namespace eagercache
