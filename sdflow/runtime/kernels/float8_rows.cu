// Rows of float16 or bfloat16 as E4M3 with a scale for each, as float8 products read them: of values that are there; in float16
// also of a GELU with its gate and of a layer normalization. A row's largest magnitude becomes 448. Computed in float32; what is
// quantized is rounded to 16 bits first, as it is where another kernel writes it.

#if __CUDA_ARCH__ >= 890

// A row is held by `warps` warps, a power of two, FLOAT8_HELD vectors of eight channels in each thread; a block has
// FLOAT8_WARPS warps, or twice as many where one row takes them. Block (32, warps).
struct Rows {
    int rows, lanes, warps;  // lanes: vectors of a row
    int tokens, whole, first;  // of x's rows: `tokens` from `first` on of each `whole`
};

struct Held {
    int row, part, first, step, end;  // this thread's vectors: lanes first, first + step, ... below end
    uint4 at[FLOAT8_HELD];
};

static __device__ __forceinline__ Held of_thread(const Rows& all) {
    Held held;
    const int warp = threadIdx.y;
    held.row = blockIdx.x * ((int)blockDim.y / all.warps) + warp / all.warps;
    held.part = warp % all.warps;
    held.first = held.part * 32 + threadIdx.x;
    held.step = all.warps * 32;
    held.end = held.row < all.rows ? all.lanes : 0;
    return held;
}

// Of all threads of a row. shared: a number for each warp, that nothing else is in.
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

template <class Type>
static __device__ __forceinline__ void quantize(const Held& held, const Rows& all, uint2* y, float* scales, float* shared) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < FLOAT8_HELD; ++i) {
        if (held.first + i * held.step >= held.end) continue;
        largest = fmaxf(largest, largest_of(Type::floats_of(held.at[i])));
    }
    largest = largest_of_row(largest, held, all.warps, shared);
    const float up = up_of(largest);
    if (held.end && held.first == 0) scales[held.row] = scale_of(largest);
#pragma unroll
    for (int i = 0; i < FLOAT8_HELD; ++i) {
        const int lane = held.first + i * held.step;
        if (lane >= held.end) continue;
        y[(size_t)held.row * all.lanes + lane] = eights_of(Type::floats_of(held.at[i]), up);
    }
}

// x: (images, whole, lanes), y: (images, tokens, lanes); scales: a number for each row of y.
template <class Type>
static __device__ __forceinline__ void quantize_rows(const uint4* __restrict__ x, uint2* __restrict__ y,
                                                     float* __restrict__ scales, const Rows& all) {
    wait_for_earlier_kernels();
    __shared__ float shared[2 * FLOAT8_WARPS];
    Held held = of_thread(all);
    const int image = held.row / all.tokens;
    const size_t from = ((size_t)image * all.whole + all.first + held.row - image * all.tokens) * all.lanes;
#pragma unroll
    for (int i = 0; i < FLOAT8_HELD; ++i) {
        const int lane = held.first + i * held.step;
        if (lane < held.end) held.at[i] = x[from + lane];
    }
    quantize<Type>(held, all, y, scales, shared);
}

extern "C" __global__ void __launch_bounds__(2 * 32 * FLOAT8_WARPS)
float8_rows(const uint4* __restrict__ x, uint2* __restrict__ y, float* __restrict__ scales, Rows all) {
    quantize_rows<Half>(x, y, scales, all);
}

extern "C" __global__ void __launch_bounds__(2 * 32 * FLOAT8_WARPS)
float8_rows_bfloat16(const uint4* __restrict__ x, uint2* __restrict__ y, float* __restrict__ scales, Rows all) {
    quantize_rows<Bfloat16>(x, y, scales, all);
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
    quantize<Half>(held, all, y, scales, shared);
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
    quantize<Half>(held, all, y, scales, shared[2]);
}

#endif
