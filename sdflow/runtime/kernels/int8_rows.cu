// Rows of float16 or bfloat16 as int8 with a scale for each, as int8 products read them; rotated before that, if wanted, by a
// Hadamard matrix in groups of channels. Computed in float32.

#define LARGEST_INT8 127.0f
#define SMALLEST_SCALE 1.17549435e-38f

// A row is held by `warps` warps, a power of two, INT8_HELD vectors of eight channels in each thread; a block has INT8_WARPS
// warps, or twice as many where one row takes them. Block (32, warps).
struct Int8Rows {
    int rows, lanes, warps;  // lanes: vectors of a row
    int rotation;  // channels of a group, 0: none
};

// The product of a group of `size` channels, that neighbouring lanes hold, and Sylvester's matrix over the square root of its size.
// Of all lanes of a warp.
static __device__ __forceinline__ void rotate(Floats& values, int size) {
    float* const at = values.at;
#pragma unroll
    for (int width = 1; width < VECTOR; width *= 2) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            if (i & width) continue;
            const float first = at[i], second = at[i + width];
            at[i] = first + second;
            at[i + width] = first - second;
        }
    }
    for (int distance = 1; distance * VECTOR < size; distance *= 2) {
        const bool upper = threadIdx.x & distance;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float other = __shfl_xor_sync(0xffffffffu, at[i], distance);
            at[i] = upper ? other - at[i] : at[i] + other;
        }
    }
    const float root = sqrtf((float)size);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) at[i] /= root;
}

static __device__ __forceinline__ unsigned bytes_of(const float* values, float up) {
    unsigned four = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) four |= ((unsigned)__float2int_rn(values[i] * up) & 255u) << 8 * i;
    return four;
}

// x: (rows, lanes), y: (rows, lanes); scales: a number for each row. Magnitudes are compared by their bits, which puts what is no
// number above all others: the scale of such a row is no number either, nor is what comes of it.
template <class Type>
static __device__ __forceinline__ void quantize_to_int8(const uint4* __restrict__ x, uint2* __restrict__ y,
                                                        float* __restrict__ scales, const Int8Rows& all) {
    wait_for_earlier_kernels();
    __shared__ unsigned shared[2 * INT8_WARPS];
    const int warp = threadIdx.y, part = warp % all.warps;
    const int row = blockIdx.x * ((int)blockDim.y / all.warps) + warp / all.warps;
    const int first = part * 32 + threadIdx.x, step = all.warps * 32, end = row < all.rows ? all.lanes : 0;
    const size_t from = (size_t)row * all.lanes;
    Floats held[INT8_HELD];
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < INT8_HELD; ++i) {
        const int lane = first + i * step;
        held[i] = Type::floats_of(lane < end ? x[from + lane] : make_uint4(0, 0, 0, 0));
        if (all.rotation) rotate(held[i], all.rotation);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            const unsigned size = __float_as_uint(held[i].at[j]) & 0x7fffffffu;
            largest = size > largest ? size : largest;
        }
    }
#pragma unroll
    for (int distance = 16; distance; distance /= 2) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, largest, distance);
        largest = other > largest ? other : largest;
    }
    if (all.warps > 1) {
        if (threadIdx.x == 0) shared[warp] = largest;
        __syncthreads();
        for (int i = 0; i < all.warps; ++i) {
            const unsigned other = shared[warp - part + i];
            largest = other > largest ? other : largest;
        }
    }
    const float size = __int_as_float((int)largest), scale = size / LARGEST_INT8;
    const bool nothing = scale < SMALLEST_SCALE;  // zeros, or nearly
    const float up = nothing ? 1.0f : LARGEST_INT8 / size;
    if (end && first == 0) scales[row] = nothing ? 1.0f : scale;
#pragma unroll
    for (int i = 0; i < INT8_HELD; ++i) {
        const int lane = first + i * step;
        if (lane < end) y[from + lane] = make_uint2(bytes_of(held[i].at, up), bytes_of(held[i].at + 4, up));
    }
}

extern "C" __global__ void __launch_bounds__(2 * 32 * INT8_WARPS)
int8_rows_half(const uint4* __restrict__ x, uint2* __restrict__ y, float* __restrict__ scales, Int8Rows all) {
    quantize_to_int8<Half>(x, y, scales, all);
}

#if __CUDA_ARCH__ >= 800
extern "C" __global__ void __launch_bounds__(2 * 32 * INT8_WARPS)
int8_rows_bfloat16(const uint4* __restrict__ x, uint2* __restrict__ y, float* __restrict__ scales, Int8Rows all) {
    quantize_to_int8<Bfloat16>(x, y, scales, all);
}
#endif
