// Pairs of float16, the first one in the low bits. In PTX: cuda_fp16.h is not there without the CUDA toolkit.

static __device__ __forceinline__ float2 unpacked(unsigned pair) {
    float2 result;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(result.x), "=f"(result.y) : "r"(pair));
    return result;
}

static __device__ __forceinline__ unsigned packed(float low, float high) {
    unsigned pair;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("{.reg .b16 low, high; cvt.rn.f16.f32 low, %2; cvt.rn.f16.f32 high, %1; mov.b32 %0, {low, high};}"
        : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}
