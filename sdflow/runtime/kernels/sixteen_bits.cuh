// Eight neighbouring channels of one of two types, as floats to compute with and back: what kernels for both are templates over.

struct Half {
    static __device__ __forceinline__ Floats floats_of(uint4 values) { return floats(values); }
    static __device__ __forceinline__ uint4 rounded(const Floats& values) { return halves(values); }
};

struct Bfloat16 {
    static __device__ __forceinline__ Floats floats_of(uint4 values) {
        const unsigned pairs[4] = {values.x, values.y, values.z, values.w};
        Floats result;
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // the upper half of a float32
            result.at[2 * i] = __int_as_float(pairs[i] << 16);
            result.at[2 * i + 1] = __int_as_float(pairs[i] & 0xffff0000u);
        }
        return result;
    }
    static __device__ __forceinline__ uint4 rounded(const Floats& values) {
        return make_uint4(packed_bfloat16(values.at[0], values.at[1]), packed_bfloat16(values.at[2], values.at[3]),
                          packed_bfloat16(values.at[4], values.at[5]), packed_bfloat16(values.at[6], values.at[7]));
    }
};
