// Images that are read twice: a kernel that sums, and one that normalizes. Vector: uint4 for float16, Singles for float32.

#define IN_FLIGHT (64 / (int)sizeof(Vector))  // what the registers hold

// The eight channels' images are (images, rows, lanes): rows are positions, lanes channels / VECTOR.
struct Layout {
    int rows, lanes, channels_per_group, groups;
    int rows_per_block;  // of this kernel
    int skip_rows;       // rows of skip: as many as of x, 1 when it holds for all positions, 0 when there is none
};

// What is the same at all positions: the bias, and a skip of one row.
template <class Vector>
static __device__ __forceinline__ Floats constant_part(const Vector* skip, const Vector* bias, const Layout& layout,
                                                       int image, int lane) {
    Floats result = {};
    if (bias) result = floats(bias[lane]);
    if (layout.skip_rows == 1) add(result, floats(skip[(size_t)image * layout.lanes + lane]));
    return result;
}

template <class Vector>
static __device__ __forceinline__ Floats summed(const Vector& x, const Vector& skip, const Floats& constant, bool with_skip) {
    Floats result = floats(x);
    add(result, constant);
    if (with_skip) add(result, floats(skip));
    return result;
}

// Grid (blocks, images), block: a multiple of 32, at least `lanes` threads. partials: (images, blocks, groups, 2).
// sum: where s is kept, or null.
template <class Vector>
static __device__ __forceinline__ void sums_of(const Vector* __restrict__ x, const Vector* __restrict__ skip,
                                               const Vector* __restrict__ bias, Vector* __restrict__ sum,
                                               float2* __restrict__ partials, const Layout& layout, float4* found) {
    const int image = blockIdx.y, lane = threadIdx.x % layout.lanes, row = threadIdx.x / layout.lanes;
    const int step = blockDim.x / layout.lanes;
    const bool with_skip = layout.skip_rows > 1;
    if (row < step) {
        const int end = min((int)(blockIdx.x + 1) * layout.rows_per_block, layout.rows);
        const size_t start = (size_t)image * layout.rows * layout.lanes + lane;
        const Floats constant = constant_part(skip, bias, layout, image, lane);
        Floats sums = {}, squares = {};
        for (int first = blockIdx.x * layout.rows_per_block + row; first < end; first += IN_FLIGHT * step) {
            Vector read[IN_FLIGHT], read_skip[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                const int at = min(first + i * step, end - 1);
                read[i] = x[start + (size_t)at * layout.lanes];
                if (with_skip) read_skip[i] = skip[start + (size_t)at * layout.lanes];
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                const int at = first + i * step;
                if (at >= end) break;
                Floats values = summed(read[i], read_skip[i], constant, with_skip);
                if (sum) {
                    const Vector rounded = stored<Vector>(values);
                    sum[start + (size_t)at * layout.lanes] = rounded;
                    values = floats(rounded);
                }
                add_to(sums, squares, values);
            }
        }
        const int split = in_first_group(lane, layout.channels_per_group);
        found[threadIdx.x] = by_group(sums, squares, split);
    }
    __syncthreads();
    const int width = layout.channels_per_group;
    for (int group = threadIdx.x / 32; group < layout.groups; group += blockDim.x / 32) {
        const float2 total = of_group(found, group, width, layout.lanes, step);
        if (threadIdx.x % 32 == 0)
            partials[((size_t)image * gridDim.x + blockIdx.x) * layout.groups + group] = total;
    }
}

// Grid (blocks, images). partials: (images, parts, groups, 2), groups at most 32. Where s was kept, it comes as x, without
// skip and bias.
template <class Vector>
static __device__ __forceinline__ void apply_to(const Vector* __restrict__ x, const Vector* __restrict__ skip,
                                                const Vector* __restrict__ bias, const float* __restrict__ gamma,
                                                const float* __restrict__ beta, const float2* __restrict__ partials,
                                                Vector* __restrict__ y, const Layout& layout, int parts, float epsilon,
                                                int silu, float2* found, float2* statistics) {
    const int image = blockIdx.y, groups = layout.groups;
    {
        const int group = threadIdx.x % groups, slice = threadIdx.x / groups, slices = blockDim.x / groups;
        float2 total = make_float2(0, 0);
        if (slice < slices) {
            for (int part = slice; part < parts; part += slices) {
                const float2 next = partials[((size_t)image * parts + part) * groups + group];
                total.x += next.x;
                total.y += next.y;
            }
        }
        found[threadIdx.x] = total;
        __syncthreads();
        if (threadIdx.x < groups) {
            for (int i = 1; i < slices; ++i) {
                total.x += found[i * groups + group].x;
                total.y += found[i * groups + group].y;
            }
            statistics[group] = mean_and_scale(total, (float)layout.rows * layout.channels_per_group, epsilon);
        }
        __syncthreads();
    }
    const int lane = threadIdx.x % layout.lanes, row = threadIdx.x / layout.lanes, step = blockDim.x / layout.lanes;
    if (row >= step) return;
    const bool with_skip = layout.skip_rows > 1;
    const Floats constant = constant_part(skip, bias, layout, image, lane);
    const int split = in_first_group(lane, layout.channels_per_group);
    const int group = lane * VECTOR / layout.channels_per_group;
    Floats scale, shift;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
        const float2 own = statistics[j < split ? group : group + 1];
        scale.at[j] = own.y * gamma[lane * VECTOR + j];
        shift.at[j] = beta[lane * VECTOR + j] + (constant.at[j] - own.x) * scale.at[j];
    }
    const int end = min((int)(blockIdx.x + 1) * layout.rows_per_block, layout.rows);
    const size_t start = (size_t)image * layout.rows * layout.lanes + lane;
    for (int first = blockIdx.x * layout.rows_per_block + row; first < end; first += IN_FLIGHT * step) {
        Vector read[IN_FLIGHT], read_skip[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int at = min(first + i * step, end - 1);
            read[i] = x[start + (size_t)at * layout.lanes];
            if (with_skip) read_skip[i] = skip[start + (size_t)at * layout.lanes];
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int at = first + i * step;
            if (at >= end) break;
            Floats values = floats(read[i]);
            if (with_skip) add(values, floats(read_skip[i]));
            y[start + (size_t)at * layout.lanes] = stored<Vector>(normalized(values, scale, shift, silu));
        }
    }
}

#define GROUP_NORM_TWICE(sums, apply, Vector)                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
    sums(const Vector* __restrict__ x, const Vector* __restrict__ skip, const Vector* __restrict__ bias,                \
         Vector* __restrict__ sum, float2* __restrict__ partials, const Layout layout) {                                \
        __shared__ float4 found[THREADS];                                                                               \
        wait_for_earlier_kernels();                                                                                     \
        sums_of(x, skip, bias, sum, partials, layout, found);                                                           \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
    apply(const Vector* __restrict__ x, const Vector* __restrict__ skip, const Vector* __restrict__ bias,               \
          const float* __restrict__ gamma, const float* __restrict__ beta, const float2* __restrict__ partials,         \
          Vector* __restrict__ y, const Layout layout, int parts, float epsilon, int silu) {                            \
        __shared__ float2 found[THREADS];                                                                               \
        __shared__ float2 statistics[32]; /* mean, 1 / deviation */                                                     \
        wait_for_earlier_kernels();                                                                                     \
        apply_to(x, skip, bias, gamma, beta, partials, y, layout, parts, epsilon, silu, found, statistics);             \
    }
GROUP_NORM_TWICE(group_norm_sums, group_norm_apply, uint4)
GROUP_NORM_TWICE(group_norm_sums_single, group_norm_apply_single, Singles)
#undef IN_FLIGHT
