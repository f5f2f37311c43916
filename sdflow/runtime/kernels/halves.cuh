// Eight neighbouring channels as a thread has them: 16 bytes of float16 in memory, or 32 of float32; floats to compute with.
//
// No headers: NVRTC compiles this where no CUDA toolkit is installed.

#define VECTOR 8

struct Floats {
    float at[VECTOR];
};

struct alignas(16) Singles {
    float4 low, high;
};

static __device__ __forceinline__ Floats floats(uint4 halves) {
    const unsigned pairs[4] = {halves.x, halves.y, halves.z, halves.w};
    Floats result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 both = unpacked(pairs[i]);
        result.at[2 * i] = both.x;
        result.at[2 * i + 1] = both.y;
    }
    return result;
}

static __device__ __forceinline__ uint4 halves(const Floats& values) {
    return make_uint4(packed(values.at[0], values.at[1]), packed(values.at[2], values.at[3]),
                      packed(values.at[4], values.at[5]), packed(values.at[6], values.at[7]));
}

static __device__ __forceinline__ Floats floats(const Singles& singles) {
    const float4 low = singles.low, high = singles.high;
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

// As they lie in memory.
template <class Vector>
static __device__ __forceinline__ Vector stored(const Floats& values);
template <>
__device__ __forceinline__ uint4 stored<uint4>(const Floats& values) {
    return halves(values);
}
template <>
__device__ __forceinline__ Singles stored<Singles>(const Floats& values) {
    return {make_float4(values.at[0], values.at[1], values.at[2], values.at[3]),
            make_float4(values.at[4], values.at[5], values.at[6], values.at[7])};
}

static __device__ __forceinline__ void add(Floats& to, const Floats& value) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) to.at[i] += value.at[i];
}
