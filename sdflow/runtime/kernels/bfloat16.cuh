// Pairs of bfloat16, the first one in the low bits. In PTX: cuda_bf16.h is not there without the CUDA toolkit.

static __device__ __forceinline__ unsigned packed_bfloat16(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
