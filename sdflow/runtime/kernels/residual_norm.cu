// What lies between two products of a diffusion transformer, in one pass: the residual sum, its norm and the modulation.
//
//     sum = x + gate * (branch + bias)            one such branch, two or none
//     y   = norm(sum) * (1 + scale) + shift       one such modulation of the norm, two or none
//
// norm: a layer normalization, an RMS normalization or the sum itself. A branch can have an RMS normalization of its own before
// its gate. Gates, scales and shifts are a row for each image, gamma, beta and bias one for all. Everything is float16 or
// bfloat16 in memory and float32 in registers: the norm is that of the sum before it is rounded. Where only products of float8 read
// y, it is written as rows of E4M3 with a scale for each (float8_row.cuh), rounded to its 16 bits before.
//
// A block has a row. A thread holds RESIDUAL_HELD vectors of eight channels, so that all loads of the row are under way at once,
// and nothing is read twice.

// A row of `lanes` vectors for each image: `step` vectors apart, or 0 where all images have one. Null: there is none.
struct PerImage {
    const uint4* at;
    int step;
};

struct Branch {
    const uint4 *at, *bias, *gamma;  // gamma: of its own norm
    PerImage gate;
};

struct ResidualNorm {
    const uint4* x;
    Branch branches[2];
    const uint4 *gamma, *beta;
    PerImage scale[2], shift[2];
    uint4 *sum, *y[2];  // y: uint2 of float8
    float* scales[2];   // of float8, one for each row
    int rows, lanes;  // rows of an image, vectors of a row
    int norm;         // NO_NORM, LAYER_NORM or RMS_NORM
    int plus_one;     // bit i: modulation i scales by 1 + scale
    float epsilon, branch_epsilon;
};

enum { NO_NORM = 0, LAYER_NORM = 1, RMS_NORM = 2 };

// A thread's vectors of a row.
struct Mine {
    int first, step, lanes;
    __device__ __forceinline__ int lane(int i) const { return first + i * step; }
    __device__ __forceinline__ bool has(int i) const { return lane(i) < lanes; }
};

struct Raw {
    uint4 at[RESIDUAL_HELD];
};

static __device__ __forceinline__ void load(Raw& to, const uint4* from, const Mine& mine) {
#pragma unroll
    for (int i = 0; i < RESIDUAL_HELD; ++i) {
        if (mine.has(i)) to.at[i] = from[mine.lane(i)];
    }
}

// Of a block. shared: 32 numbers that nothing else is in.
static __device__ __forceinline__ float sum_of_block(float value, float* shared) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    if (blockDim.y == 1) return value;
    if (threadIdx.x == 0) shared[threadIdx.y] = value;
    __syncthreads();
    value = 0;
    for (int i = 0; i < (int)blockDim.y; ++i) value += shared[i];
    return value;
}

static __device__ __forceinline__ const uint4* of_image(const PerImage& rows) {
    return rows.at + (size_t)blockIdx.y * rows.step;
}

// The branch plus its bias, by its own norm where NORMED, and by its gate, is added to `sum`.
template <class Type, bool NORMED>
static __device__ __forceinline__ void add_branch(Floats (&sum)[RESIDUAL_HELD], const Raw& raw, const Branch& branch,
                                                  const ResidualNorm& of, const Mine& mine, float* shared) {
    Raw bias, gate, gamma;
    if (branch.bias) load(bias, branch.bias, mine);
    if (branch.gate.at) load(gate, of_image(branch.gate), mine);
    float by = 1;
    if (NORMED) {
        load(gamma, branch.gamma, mine);
        float squares = 0;
#pragma unroll
        for (int i = 0; i < RESIDUAL_HELD; ++i) {
            if (!mine.has(i)) continue;
            Floats value = Type::floats_of(raw.at[i]);
            if (branch.bias) add(value, Type::floats_of(bias.at[i]));
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) squares += value.at[j] * value.at[j];
        }
        by = rsqrtf(sum_of_block(squares, shared) / (VECTOR * of.lanes) + of.branch_epsilon);
    }
#pragma unroll
    for (int i = 0; i < RESIDUAL_HELD; ++i) {
        if (!mine.has(i)) continue;
        Floats value = Type::floats_of(raw.at[i]);
        if (branch.bias) add(value, Type::floats_of(bias.at[i]));
        if (NORMED) {
            const Floats own = Type::floats_of(gamma.at[i]);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) value.at[j] *= by * own.at[j];
        }
        if (branch.gate.at) {
            const Floats gated = Type::floats_of(gate.at[i]);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) value.at[j] *= gated.at[j];
        }
        add(sum[i], value);
    }
}

// In place, from sums to their norm without gamma and beta.
static __device__ __forceinline__ void normalize(Floats (&sum)[RESIDUAL_HELD], const ResidualNorm& of, const Mine& mine,
                                                 float (*shared)[32]) {
    const float channels = VECTOR * of.lanes;
    if (of.norm == LAYER_NORM) {
        float total = 0;
#pragma unroll
        for (int i = 0; i < RESIDUAL_HELD; ++i) {
            if (!mine.has(i)) continue;
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) total += sum[i].at[j];
        }
        const float mean = sum_of_block(total, shared[1]) / channels;
#pragma unroll
        for (int i = 0; i < RESIDUAL_HELD; ++i) {
            if (!mine.has(i)) continue;
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) sum[i].at[j] -= mean;
        }
    }
    float squares = 0;
#pragma unroll
    for (int i = 0; i < RESIDUAL_HELD; ++i) {
        if (!mine.has(i)) continue;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) squares += sum[i].at[j] * sum[i].at[j];
    }
    const float by = rsqrtf(sum_of_block(squares, shared[2]) / channels + of.epsilon);
#pragma unroll
    for (int i = 0; i < RESIDUAL_HELD; ++i) {
        if (!mine.has(i)) continue;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) sum[i].at[j] *= by;
    }
}

static __device__ __forceinline__ void multiply_add(Floats& value, const Floats& by, float more, const Floats& plus) {
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) value.at[j] = value.at[j] * (by.at[j] + more) + plus.at[j];
}

// y: where the row begins.
template <class Type>
static __device__ __forceinline__ void store_row(const Raw& row, uint2* y, float* scales, const Mine& mine, float* shared) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < RESIDUAL_HELD; ++i) {
        if (mine.has(i)) largest = fmaxf(largest, largest_of(Type::floats_of(row.at[i])));
    }
    largest = largest_of_block(largest, shared);
    if (mine.first == 0) scales[(size_t)blockIdx.y * gridDim.x + blockIdx.x] = scale_of(largest);
    const float up = up_of(largest);
#pragma unroll
    for (int i = 0; i < RESIDUAL_HELD; ++i) {
        if (mine.has(i)) y[mine.lane(i)] = eights_of(Type::floats_of(row.at[i]), up);
    }
}

// Grid (rows, images), block (32, warps): 32 * warps * RESIDUAL_HELD >= lanes.
template <class Type, bool NORMED, bool FLOAT8>
static __device__ __forceinline__ void residual_norm(const ResidualNorm& of) {
    wait_for_earlier_kernels();
    __shared__ float shared[FLOAT8 ? 5 : 3][32];
    const Mine mine = {(int)(threadIdx.y * 32 + threadIdx.x), (int)(32 * blockDim.y), of.lanes};
    const size_t start = ((size_t)blockIdx.y * of.rows + blockIdx.x) * of.lanes;
    const Branch &one = of.branches[0], &other = of.branches[1];
    Raw x, first, second;
    load(x, of.x + start, mine);
    if (one.at) load(first, one.at + start, mine);
    if (!NORMED && other.at) load(second, other.at + start, mine);
    Floats sum[RESIDUAL_HELD];
#pragma unroll
    for (int i = 0; i < RESIDUAL_HELD; ++i) {
        if (mine.has(i)) sum[i] = Type::floats_of(x.at[i]);
    }
    if (one.at) add_branch<Type, NORMED>(sum, first, one, of, mine, shared[0]);
    if (!NORMED && other.at) add_branch<Type, false>(sum, second, other, of, mine, shared[0]);
    if (of.sum) {
#pragma unroll
        for (int i = 0; i < RESIDUAL_HELD; ++i) {
            if (mine.has(i)) of.sum[start + mine.lane(i)] = Type::rounded(sum[i]);
        }
    }
    if (!of.y[0]) return;
    Raw scale, shift;  // on their way while the norm is computed
    if (of.scale[0].at) load(scale, of_image(of.scale[0]), mine);
    if (of.shift[0].at) load(shift, of_image(of.shift[0]), mine);
    if (of.norm != NO_NORM) normalize(sum, of, mine, shared);
    const Floats none = {};
    if (of.gamma) {
        Raw gamma, beta;
        load(gamma, of.gamma, mine);
        if (of.beta) load(beta, of.beta, mine);
#pragma unroll
        for (int i = 0; i < RESIDUAL_HELD; ++i) {
            if (mine.has(i))
                multiply_add(sum[i], Type::floats_of(gamma.at[i]), 0, of.beta ? Type::floats_of(beta.at[i]) : none);
        }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        uint4* y = of.y[k];
        if (!y) return;
        if (k && of.scale[k].at) load(scale, of_image(of.scale[k]), mine);
        if (k && of.shift[k].at) load(shift, of_image(of.shift[k]), mine);
        const float more = of.plus_one >> k & 1 ? 1.0f : 0.0f;
        Raw rounded;
#pragma unroll
        for (int i = 0; i < RESIDUAL_HELD; ++i) {
            if (!mine.has(i)) continue;
            Floats value = sum[i];
            if (of.scale[k].at)
                multiply_add(value, Type::floats_of(scale.at[i]), more, of.shift[k].at ? Type::floats_of(shift.at[i]) : none);
            else if (of.shift[k].at)
                add(value, Type::floats_of(shift.at[i]));
            rounded.at[i] = Type::rounded(value);
            if (!FLOAT8) y[start + mine.lane(i)] = rounded.at[i];
        }
        if constexpr (FLOAT8) store_row<Type>(rounded, (uint2*)y + start, of.scales[k], mine, shared[3 + k]);
    }
}

#define RESIDUAL_NORM(NAME, ...)                                                                                          \
    extern "C" __global__ void __launch_bounds__(RESIDUAL_THREADS) NAME(const ResidualNorm of) { residual_norm<__VA_ARGS__>(of); }

RESIDUAL_NORM(residual_norm_half, Half, false, false)
RESIDUAL_NORM(residual_norm_half_normed, Half, true, false)
RESIDUAL_NORM(residual_norm_bfloat16, Bfloat16, false, false)
RESIDUAL_NORM(residual_norm_bfloat16_normed, Bfloat16, true, false)
#if __CUDA_ARCH__ >= 890
RESIDUAL_NORM(float8_norm_half, Half, false, true)
RESIDUAL_NORM(float8_norm_half_normed, Half, true, true)
RESIDUAL_NORM(float8_norm_bfloat16, Bfloat16, false, true)
RESIDUAL_NORM(float8_norm_bfloat16_normed, Bfloat16, true, true)
#endif
