// Eight neighbouring channels of float16 as a thread has them: 16 bytes in memory, floats to compute with.
//
// No headers: NVRTC compiles this where no CUDA toolkit is installed.

#define VECTOR 8

struct Floats {
    float at[VECTOR];
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

static __device__ __forceinline__ void add(Floats& to, const Floats& value) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) to.at[i] += value.at[i];
}
