// What a row of E4M3 is made of: its largest magnitude becomes 448, and its scale is what each of its numbers is to be multiplied
// with. A row of zeros has the scale 1.

#define LARGEST_FLOAT8 448.0f

static __device__ __forceinline__ float largest_of(const Floats& values) {
    float largest = 0;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) largest = fmaxf(largest, fabsf(values.at[j]));
    return largest;
}

static __device__ __forceinline__ float up_of(float largest) { return largest > 0 ? LARGEST_FLOAT8 / largest : 1.0f; }
static __device__ __forceinline__ float scale_of(float largest) { return largest > 0 ? largest / LARGEST_FLOAT8 : 1.0f; }

#if __CUDA_ARCH__ >= 890
static __device__ __forceinline__ uint2 eights_of(const Floats& values, float up) {
    const float* const v = values.at;
    return make_uint2(eights(v[0] * up, v[1] * up, v[2] * up, v[3] * up), eights(v[4] * up, v[5] * up, v[6] * up, v[7] * up));
}
#endif

// Of a block of (32, warps) threads, one row. shared: 32 numbers that nothing else is in.
static __device__ __forceinline__ float largest_of_block(float value, float* shared) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    if (blockDim.y == 1) return value;
    if (threadIdx.x == 0) shared[threadIdx.y] = value;
    __syncthreads();
    for (int i = 0; i < (int)blockDim.y; ++i) value = fmaxf(value, shared[i]);
    return value;
}
