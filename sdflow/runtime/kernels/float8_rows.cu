// Rows of float16 as E4M3 with a scale for each, as float8 products read them: of values that are there, of a GELU with its
// gate, of a layer normalization. A row's largest magnitude becomes 448. Computed in float32; what is quantized is rounded to
// float16 first, as it is where another kernel writes it.

#if __CUDA_ARCH__ >= 890

#define LARGEST_FLOAT8 448.0f

// A row is held by `warps` warps, a power of two, FLOAT8_HELD vectors of eight channels in each thread; a block has
// FLOAT8_WARPS warps. Block (32, FLOAT8_WARPS).
struct Rows {
    int rows, lanes, warps;  // lanes: vectors of a row
};

struct Held {
    int row, part, first, step, end;  // this thread's vectors: lanes first, first + step, ... below end
    uint4 at[FLOAT8_HELD];
};

static __device__ __forceinline__ Held of_thread(const Rows& all) {
    Held held;
    const int warp = threadIdx.y;
    held.row = blockIdx.x * (FLOAT8_WARPS / all.warps) + warp / all.warps;
    held.part = warp % all.warps;
    held.first = held.part * 32 + threadIdx.x;
    held.step = all.warps * 32;
    held.end = held.row < all.rows ? all.lanes : 0;
    return held;
}

// Of all threads of a row. shared: FLOAT8_WARPS numbers that nothing else is in.
static __device__ __forceinline__ float sum_of_row(float value, const Held& held, int warps, float* shared) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
    if (warps == 1) return value;
    if (threadIdx.x == 0) shared[threadIdx.y] = value;
    __syncthreads();
    value = 0;
    for (int i = 0; i < warps; ++i) value += shared[threadIdx.y - held.part + i];
    return value;
}

static __device__ __forceinline__ float largest_of_row(float value, const Held& held, int warps, float* shared) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
    if (warps == 1) return value;
    if (threadIdx.x == 0) shared[threadIdx.y] = value;
    __syncthreads();
    for (int i = 0; i < warps; ++i) value = fmaxf(value, shared[threadIdx.y - held.part + i]);
    return value;
}

static __device__ __forceinline__ void quantize(const Held& held, const Rows& all, uint2* y, float* scales, float* shared) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < FLOAT8_HELD; ++i) {
        if (held.first + i * held.step >= held.end) continue;
        const Floats values = floats(held.at[i]);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) largest = fmaxf(largest, fabsf(values.at[j]));
    }
    largest = largest_of_row(largest, held, all.warps, shared);
    const float up = largest > 0 ? LARGEST_FLOAT8 / largest : 1.0f;
    if (held.end && held.first == 0) scales[held.row] = largest > 0 ? largest / LARGEST_FLOAT8 : 1.0f;
#pragma unroll
    for (int i = 0; i < FLOAT8_HELD; ++i) {
        const int lane = held.first + i * held.step;
        if (lane >= held.end) continue;
        const Floats v = floats(held.at[i]);
        y[(size_t)held.row * all.lanes + lane] =
            make_uint2(eights(v.at[0] * up, v.at[1] * up, v.at[2] * up, v.at[3] * up),
                       eights(v.at[4] * up, v.at[5] * up, v.at[6] * up, v.at[7] * up));
    }
}

// x: (rows, lanes), y the same; scales: (rows).
extern "C" __global__ void __launch_bounds__(32 * FLOAT8_WARPS)
float8_rows(const uint4* __restrict__ x, uint2* __restrict__ y, float* __restrict__ scales, Rows all) {
    wait_for_earlier_kernels();
    __shared__ float shared[FLOAT8_WARPS];
    Held held = of_thread(all);
#pragma unroll
    for (int i = 0; i < FLOAT8_HELD; ++i) {
        const int lane = held.first + i * held.step;
        if (lane < held.end) held.at[i] = x[(size_t)held.row * all.lanes + lane];
    }
    quantize(held, all, y, scales, shared);
}

// As bias_split_gelu. x: (rows, 2 lanes), bias: (2 lanes), y: (rows, lanes).
extern "C" __global__ void __launch_bounds__(32 * FLOAT8_WARPS)
float8_split_gelu(const uint4* __restrict__ x, const uint4* __restrict__ bias, uint2* __restrict__ y,
                  float* __restrict__ scales, Rows all) {
    wait_for_earlier_kernels();
    __shared__ float shared[FLOAT8_WARPS];
    Held held = of_thread(all);
#pragma unroll
    for (int i = 0; i < FLOAT8_HELD; ++i) {
        const int lane = held.first + i * held.step;
        if (lane >= held.end) continue;
        Floats plain = floats(x[(size_t)held.row * 2 * all.lanes + lane]);
        Floats gate = floats(x[((size_t)held.row * 2 + 1) * all.lanes + lane]);
        add(plain, floats(bias[lane]));
        add(gate, floats(bias[all.lanes + lane]));
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) plain.at[j] *= gelu(gate.at[j]);
        held.at[i] = halves(plain);
    }
    quantize(held, all, y, scales, shared);
}

// The layer normalization of x + skip + bias, which is `sum`. x, skip, sum, y: (rows, lanes), gamma, beta, bias: (lanes).
extern "C" __global__ void __launch_bounds__(32 * FLOAT8_WARPS)
float8_layer_norm(const uint4* __restrict__ x, const uint4* __restrict__ skip, const uint4* __restrict__ gamma,
                  const uint4* __restrict__ beta, const uint4* __restrict__ bias, uint2* __restrict__ y,
                  float* __restrict__ scales, uint4* __restrict__ sum, Rows all, float epsilon) {
    wait_for_earlier_kernels();
    __shared__ float shared[3][FLOAT8_WARPS];
    Held held = of_thread(all);
    float total = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < FLOAT8_HELD; ++i) {
        const int lane = held.first + i * held.step;
        if (lane >= held.end) continue;
        const size_t place = (size_t)held.row * all.lanes + lane;
        Floats value = floats(x[place]);
        add(value, floats(skip[place]));
        add(value, floats(bias[lane]));
        held.at[i] = halves(value);
        if (sum) sum[place] = held.at[i];
        value = floats(held.at[i]);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) total += value.at[j];
    }
    const float mean = sum_of_row(total, held, all.warps, shared[0]) / (VECTOR * all.lanes);
#pragma unroll
    for (int i = 0; i < FLOAT8_HELD; ++i) {
        if (held.first + i * held.step >= held.end) continue;
        const Floats value = floats(held.at[i]);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) squares += (value.at[j] - mean) * (value.at[j] - mean);
    }
    const float variance = sum_of_row(squares, held, all.warps, shared[1]) / (VECTOR * all.lanes);
    const float factor = rsqrtf(variance + epsilon);
#pragma unroll
    for (int i = 0; i < FLOAT8_HELD; ++i) {
        const int lane = held.first + i * held.step;
        if (lane >= held.end) continue;
        Floats value = floats(held.at[i]);
        const Floats by = floats(gamma[lane]), plus = floats(beta[lane]);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) value.at[j] = (value.at[j] - mean) * factor * by.at[j] + plus.at[j];
        held.at[i] = halves(value);
    }
    quantize(held, all, y, scales, shared[2]);
}

#endif
