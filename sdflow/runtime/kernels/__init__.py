"""sdflow's own kernels for NVIDIA GPUs, in place of ONNX Runtime's where profiling shows a large gain.

Artifacts keep ONNX Runtime's operators and run anywhere, except for float8 products (`float8`). When a session is
created for fixed sizes on the CUDA provider, `replace` inserts sdflow's operators; `library` compiles the `parts` that
the graph needs once per machine, and tests them there before use. If that fails, ONNX Runtime's kernels run, with a
warning.

    group_norm*.cu, .c       GroupNorm and SkipGroupNorm with SiLU, float16 and float32
    bias_split_gelu.cu, .c   BiasSplitGelu, float16
    interleave.cu, .c        interleaves SubpixelConv's output into one image, float16 and float32
    few_keys_attention.cu, .c, .h
                             MultiHeadAttention with few keys, such as a text's, float16
    float8_rows.cu, .c       float8 rows and scales, of values, gated GELUs and layer normalizations
    float8_row.cuh           shared with transformer norms and activations that output such rows
    float8_product.c         float8 products, by cuBLASLt
    float8_product.cu, float8_tiles.c
                             own Hopper kernels where faster, also with a gated GELU
    geglu.cu, .c             fused MatMul and BiasSplitGelu, float16, Hopper
    rotary_qkv.cu, .c        a transformer's query, key and value: biases, head norms, rotation, joined streams;
                             float16 and bfloat16
    residual_norm.cu, .c     residual sum, norm and modulation of a transformer, float16 and bfloat16
    gated_activation.cu, .c  gated SiLU and GELU of a transformer, with biases, float16 and bfloat16
    gelu.cuh, quick_gelu.cuh GELU, shared by several
    overlap.cuh, float16.cuh, float8.cuh, bfloat16.cuh, cluster.cuh, mma.cuh, hopper.cuh
                             PTX; tests/cuda_on_cpu runs everything else without a GPU
    custom_ops.c, ort.h      the operators' interface to ONNX Runtime
"""
