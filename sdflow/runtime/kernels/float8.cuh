// Four floats as E4M3, the first one in the low bits: rounded to nearest, to even, and cut at 448. In PTX, for compute
// capability 8.9 and up: cuda_fp8.h is not there without the CUDA toolkit.

#if __CUDA_ARCH__ >= 890

static __device__ __forceinline__ unsigned eights(float a, float b, float c, float d) {
    unsigned four;
    asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; "
        "mov.b32 %0, {low, high};}"
        : "=r"(four) : "f"(a), "f"(b), "f"(c), "f"(d));
    return four;
}

#endif
