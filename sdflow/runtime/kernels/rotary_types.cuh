// Pairs of float16 or bfloat16, the first one in the low bits, and floats: what rotary_*.cu are made for. In PTX: cuda_bf16.h is
// not there without the CUDA toolkit.

struct RotaryFloat16 {
    static __device__ __forceinline__ float2 unpacked(unsigned pair) { return ::unpacked(pair); }
    static __device__ __forceinline__ unsigned packed(float low, float high) { return ::packed(low, high); }
};

struct RotaryBfloat16 {
    static __device__ __forceinline__ float2 unpacked(unsigned pair) {
        return make_float2(__int_as_float((int)(pair << 16)), __int_as_float((int)(pair & 0xffff0000u)));
    }
    static __device__ __forceinline__ unsigned packed(float low, float high) {
        unsigned pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
};
