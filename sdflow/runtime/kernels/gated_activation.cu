// What lies between the two products of a transformer's feed-forward network, float16 or bfloat16, computed in float32.
//
//     y = silu(a + bias) * (b + bias)        SILU_GATED
//     y = gelu(a + bias)                     TANH_GELU
//
// a and b are columns of what one product gives, or two give: rows are read where they lie, `step` vectors apart. The columns
// before y's own are a copy of `before`: where the network's next product reads both, they need no Concat. Where that is a product of
// float8, its rows are written as it reads them (float8_row.cuh), rounded to their 16 bits before.

struct Activation {
    const uint4 *a, *b, *a_bias, *b_bias, *before;
    uint4* y;       // uint2 of float8
    float* scales;  // of float8, one for each row
    int a_step, b_step;
    int rows, lanes, before_lanes;  // y: (rows, before_lanes + lanes)
};

// Goes down the rows. from: the first one's vector; steps: from a row to the next of the same thread.
static __device__ __forceinline__ void copy_column(const uint4* from, uint4* to, int from_step, int to_step, int row, int rows,
                                                   int step) {
    for (; row < rows; row += step) to[(size_t)row * to_step] = from[(size_t)row * from_step];
}

// tanh's GELU: a * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (a + 0.044715 a^3) is a / (1 + exp(-2 u)).
static __device__ __forceinline__ float tanh_gelu(float a) {
    return __fdividef(a, 1.0f + __expf(-1.5957691216f * a * (1.0f + 0.044715f * a * a)));
}

static __device__ __forceinline__ float silu(float a) { return __fdividef(a, 1.0f + __expf(-a)); }

// Grid (columns, blocks), block (wide, deep).
template <class Type, bool GATED>
static __device__ __forceinline__ void activate(const Activation& of) {
    wait_for_earlier_kernels();
    const int column = blockIdx.x * blockDim.x + threadIdx.x, lane = column - of.before_lanes;
    const int step = gridDim.y * blockDim.y, to_step = of.before_lanes + of.lanes;
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (column >= to_step || row >= of.rows) return;
    if (lane < 0) return copy_column(of.before + column, of.y + column, of.before_lanes, to_step, row, of.rows, step);
    Floats a_bias = {}, b_bias = {};
    if (of.a_bias) a_bias = Type::floats_of(of.a_bias[lane]);
    if (GATED && of.b_bias) b_bias = Type::floats_of(of.b_bias[lane]);
    const uint4 *from_a = of.a + lane, *from_b = GATED ? of.b + lane : of.a;
    uint4 a = from_a[(size_t)row * of.a_step], b;
    if (GATED) b = from_b[(size_t)row * of.b_step];
    while (true) {
        const int next = row + step;
        uint4 next_a, next_b;
        if (next < of.rows) {  // on its way while this one is computed
            next_a = from_a[(size_t)next * of.a_step];
            if (GATED) next_b = from_b[(size_t)next * of.b_step];
        }
        Floats value = Type::floats_of(a), gated = {};
        add(value, a_bias);
        if (GATED) {
            gated = Type::floats_of(b);
            add(gated, b_bias);
        }
#pragma unroll
        for (int j = 0; j < VECTOR; ++j)
            value.at[j] = GATED ? silu(value.at[j]) * gated.at[j] : tanh_gelu(value.at[j]);
        of.y[(size_t)row * to_step + column] = Type::rounded(value);
        if (next >= of.rows) return;
        row = next;
        a = next_a;
        if (GATED) b = next_b;
    }
}

#if __CUDA_ARCH__ >= 890
// Grid (rows), block (32, warps): 32 * warps * ACTIVATION_HELD >= before_lanes + lanes.
template <class Type, bool GATED>
static __device__ __forceinline__ void activate_row(const Activation& of) {
    wait_for_earlier_kernels();
    __shared__ float shared[32];
    const int row = blockIdx.x, lanes = of.before_lanes + of.lanes;
    const int first = threadIdx.y * 32 + threadIdx.x, step = 32 * blockDim.y;
    uint4 held[ACTIVATION_HELD], gates[ACTIVATION_HELD];
#pragma unroll
    for (int i = 0; i < ACTIVATION_HELD; ++i) {
        const int column = first + i * step, lane = column - of.before_lanes;
        if (column >= lanes) continue;
        held[i] = lane < 0 ? of.before[(size_t)row * of.before_lanes + column] : of.a[(size_t)row * of.a_step + lane];
        if (GATED && lane >= 0) gates[i] = of.b[(size_t)row * of.b_step + lane];
    }
    float largest = 0;
#pragma unroll
    for (int i = 0; i < ACTIVATION_HELD; ++i) {
        const int column = first + i * step, lane = column - of.before_lanes;
        if (column >= lanes) continue;
        if (lane >= 0) {
            Floats value = Type::floats_of(held[i]), gated = {};
            if (of.a_bias) add(value, Type::floats_of(of.a_bias[lane]));
            if (GATED) gated = Type::floats_of(gates[i]);
            if (GATED && of.b_bias) add(gated, Type::floats_of(of.b_bias[lane]));
#pragma unroll
            for (int j = 0; j < VECTOR; ++j)
                value.at[j] = GATED ? silu(value.at[j]) * gated.at[j] : tanh_gelu(value.at[j]);
            held[i] = Type::rounded(value);
        }
        largest = fmaxf(largest, largest_of(Type::floats_of(held[i])));
    }
    largest = largest_of_block(largest, shared);
    if (first == 0) of.scales[row] = scale_of(largest);
    const float up = up_of(largest);
    uint2* const y = (uint2*)of.y + (size_t)row * lanes;
#pragma unroll
    for (int i = 0; i < ACTIVATION_HELD; ++i) {
        const int column = first + i * step;
        if (column < lanes) y[column] = eights_of(Type::floats_of(held[i]), up);
    }
}

#define FLOAT8_ACTIVATION(NAME, TYPE, GATED)                                                                              \
    extern "C" __global__ void __launch_bounds__(ACTIVATION_ROW_THREADS) NAME(const Activation of) { activate_row<TYPE, GATED>(of); }

FLOAT8_ACTIVATION(float8_tanh_gelu_half, Half, false)
FLOAT8_ACTIVATION(float8_tanh_gelu_bfloat16, Bfloat16, false)
FLOAT8_ACTIVATION(float8_silu_gated_half, Half, true)
FLOAT8_ACTIVATION(float8_silu_gated_bfloat16, Bfloat16, true)
#endif

#define ACTIVATION(NAME, TYPE, GATED)                                                                                     \
    extern "C" __global__ void __launch_bounds__(ACTIVATION_THREADS) NAME(const Activation of) { activate<TYPE, GATED>(of); }

ACTIVATION(tanh_gelu_half, Half, false)
ACTIVATION(tanh_gelu_bfloat16, Bfloat16, false)
ACTIVATION(silu_gated_half, Half, true)
ACTIVATION(silu_gated_bfloat16, Bfloat16, true)
