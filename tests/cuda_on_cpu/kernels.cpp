// The kernels' sources, unchanged, and how each is called with a launch's arguments. KERNELS: a file with them, of attention, of
// transformers, of int8 or all others.
#include "cuda.h"
#define bias_split_gelu bias_split_gelu_kernel  // the operators have the names in the same program
#define interleave interleave_kernel
#define float8_rows float8_rows_kernel
#define float8_rows_bfloat16 float8_rows_bfloat16_kernel
#define float8_split_gelu float8_split_gelu_kernel
#define float8_layer_norm float8_layer_norm_kernel
#define float8_product float8_product_kernel
#define float8_product_bfloat16 float8_product_bfloat16_kernel
#define float8_gated_product float8_gated_product_kernel
#define int8_product int8_product_kernel
#include KERNELS
#undef bias_split_gelu
#undef interleave
#undef float8_rows
#undef float8_rows_bfloat16
#undef float8_split_gelu
#undef float8_layer_norm
#undef float8_product
#undef float8_product_bfloat16
#undef float8_gated_product
#undef int8_product
#include "threads.h"

#include <utility>

template <class... Parameters, std::size_t... I>
static void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<Parameters*>(arguments[I])...);
}

template <auto kernel>
static void run(void** arguments) {
    [&]<class... Parameters>(void (*typed)(Parameters...)) {
        call(typed, arguments, std::index_sequence_for<Parameters...>{});
    }(kernel);
}

#ifdef OBJECT_attention
const Kernel attention_kernels[] = {
#define KERNEL(SIZE, PIECE, PIECES, WARPS, ...)                                                  \
    {"few_keys_attention_" #SIZE "_" #PIECE "_" #PIECES, run<few_keys_attention_##SIZE##_##PIECE##_##PIECES>, 32 * WARPS, 80},
    FEW_KEYS_KERNELS(KERNEL)
    {nullptr, nullptr, 0, 0},
};
#elif defined OBJECT_transformers
const Kernel transformer_kernels[] = {
    {"residual_norm_half", run<residual_norm_half>, RESIDUAL_THREADS, 80},
    {"residual_norm_half_normed", run<residual_norm_half_normed>, RESIDUAL_THREADS, 80},
    {"residual_norm_bfloat16", run<residual_norm_bfloat16>, RESIDUAL_THREADS, 80},
    {"residual_norm_bfloat16_normed", run<residual_norm_bfloat16_normed>, RESIDUAL_THREADS, 80},
    {"float8_norm_half", run<float8_norm_half>, RESIDUAL_THREADS, 89},
    {"float8_norm_half_normed", run<float8_norm_half_normed>, RESIDUAL_THREADS, 89},
    {"float8_norm_bfloat16", run<float8_norm_bfloat16>, RESIDUAL_THREADS, 89},
    {"float8_norm_bfloat16_normed", run<float8_norm_bfloat16_normed>, RESIDUAL_THREADS, 89},
    {"float8_tanh_gelu_half", run<float8_tanh_gelu_half>, ACTIVATION_ROW_THREADS, 89},
    {"float8_tanh_gelu_bfloat16", run<float8_tanh_gelu_bfloat16>, ACTIVATION_ROW_THREADS, 89},
    {"float8_silu_gated_half", run<float8_silu_gated_half>, ACTIVATION_ROW_THREADS, 89},
    {"float8_silu_gated_bfloat16", run<float8_silu_gated_bfloat16>, ACTIVATION_ROW_THREADS, 89},
    {"tanh_gelu_half", run<tanh_gelu_half>, ACTIVATION_THREADS, 80},
    {"tanh_gelu_bfloat16", run<tanh_gelu_bfloat16>, ACTIVATION_THREADS, 80},
    {"silu_gated_half", run<silu_gated_half>, ACTIVATION_THREADS, 80},
    {"silu_gated_bfloat16", run<silu_gated_bfloat16>, ACTIVATION_THREADS, 80},
    {"rotary_qkv_float16", run<rotary_qkv_float16>, ROTARY_THREADS, 80},
    {"rotary_qkv_bfloat16", run<rotary_qkv_bfloat16>, ROTARY_THREADS, 80},
    {nullptr, nullptr, 0, 0},
};
#elif defined OBJECT_int8
const Kernel int8_kernels[] = {
    {"int8_rows_half", run<int8_rows_half>, 2 * 32 * INT8_WARPS, 75},
    {"int8_rows_bfloat16", run<int8_rows_bfloat16>, 2 * 32 * INT8_WARPS, 80},
    {"int8_product_wide_half", run<int8_product_wide_half>, 256, 80},
    {"int8_product_wide_bfloat16", run<int8_product_wide_bfloat16>, 256, 80},
    {"int8_product_narrow_half", run<int8_product_narrow_half>, 128, 80},
    {"int8_product_narrow_bfloat16", run<int8_product_narrow_bfloat16>, 128, 80},
    {"int8_product_turing_half", run<int8_product_turing_half>, 128, 75},
    {nullptr, nullptr, 0, 0},
};
#else
const Kernel kernels[] = {
    {"group_norm_sums", run<group_norm_sums>, THREADS, 80},
    {"group_norm_apply", run<group_norm_apply>, THREADS, 80},
    {"group_norm_held_4", run<group_norm_held_4>, THREADS, 90},
    {"group_norm_held_8", run<group_norm_held_8>, THREADS, 90},
    {"group_norm_sums_single", run<group_norm_sums_single>, THREADS, 80},
    {"group_norm_apply_single", run<group_norm_apply_single>, THREADS, 80},
    {"bias_split_gelu", run<bias_split_gelu_kernel>, GELU_THREADS, 80},
    {"interleave", run<interleave_kernel>, INTERLEAVE_THREADS, 80},
    {"float8_rows", run<float8_rows_kernel>, 2 * 32 * FLOAT8_WARPS, 89},
    {"float8_rows_bfloat16", run<float8_rows_bfloat16_kernel>, 2 * 32 * FLOAT8_WARPS, 89},
    {"float8_split_gelu", run<float8_split_gelu_kernel>, 32 * FLOAT8_WARPS, 89},
    {"float8_layer_norm", run<float8_layer_norm_kernel>, 32 * FLOAT8_WARPS, 89},
    {"geglu_wide", run<geglu_wide>, 3 * WARPGROUP, 90},
    {"geglu_in_turns", run<geglu_in_turns>, 3 * WARPGROUP, 90},
    {"float8_product", run<float8_product_kernel>, 3 * WARPGROUP, 90},
    {"float8_product_bfloat16", run<float8_product_bfloat16_kernel>, 3 * WARPGROUP, 90},
    {"float8_product_in_turns", run<float8_product_in_turns>, 3 * WARPGROUP, 90},
    {"float8_product_in_turns_bfloat16", run<float8_product_in_turns_bfloat16>, 3 * WARPGROUP, 90},
    {"float8_gated_product", run<float8_gated_product_kernel>, 3 * WARPGROUP, 90},
    {nullptr, nullptr, 0, 0},
};
#endif
