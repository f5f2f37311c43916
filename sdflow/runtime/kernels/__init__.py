"""Kernels of our own for NVIDIA GPUs, in place of ONNX Runtime's where a profile shows that much is to be gained.

Artifacts keep ONNX Runtime's operators and run anywhere; only products in float8 are ours there too (`float8`). As
a session is made for fixed sizes on the CUDA provider, `replace` puts our operators in; `library` compiles those `parts` that
the graph has on the machine at hand, once, and proves them there before they are used. Where that fails, ONNX Runtime's
kernels run, and a warning says why.

    group_norm*.cu, .c       GroupNorm and SkipGroupNorm with SiLU, float16 and float32
    bias_split_gelu.cu, .c   BiasSplitGelu, float16
    interleave.cu, .c        what SubpixelConv convolves to, as one image, float16 and float32
    few_keys_attention.cu, .c, .h
                             MultiHeadAttention to a text, or as few other keys, float16
    float8_rows.cu, .c       rows of float8 and their scales, of values, gated GELUs and layer normalizations
    float8_row.cuh           what of it norms and activations of transformers have, too, which give such rows themselves
    float8_product.c         products of them, by cuBLASLt
    float8_product.cu, float8_tiles.c
                             on Hopper by our own where that is quicker, and with the GELU that gates them
    geglu.cu, .c             MatMul and BiasSplitGelu in one, float16, on Hopper
    rotary_qkv.cu, .c        what a transformer's attention reads: biases, norms of heads, rotation, two streams joined;
                             float16 and bfloat16
    residual_norm.cu, .c     residual sum, norm and modulation of a transformer, float16 and bfloat16
    gated_activation.cu, .c  its gated SiLU and its GELU, with their biases, float16 and bfloat16
    gelu.cuh, quick_gelu.cuh the GELU of several of them
    overlap.cuh, float16.cuh, float8.cuh, bfloat16.cuh, cluster.cuh, mma.cuh, hopper.cuh
                             what of it is PTX; tests/cuda_on_cpu runs all else without a GPU
    custom_ops.c, ort.h      what makes operators of ONNX Runtime of them
"""
