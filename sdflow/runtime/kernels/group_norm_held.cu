// Images that fit into registers: read once, held, normalized. Needs clusters of blocks.

#if __CUDA_ARCH__ >= 900

// Some whole groups of the images: `lanes` of a row's `row_lanes`, for each blockIdx.y.
struct Slice {
    int rows, row_lanes, lanes, channels_per_group, groups;
    int rows_per_block, skip_rows, silu;
    float epsilon;
};

// Grid (cluster, slices, images), cluster (1, 2, 4 or 8, 1, 1), block: a multiple of 32 and of slice.lanes. A thread holds
// HELD positions: rows_per_block <= HELD * blockDim.x / lanes. groups * cluster <= 32.
template <int HELD>
static __device__ __forceinline__ void normalize_held(const uint4* x, const uint4* skip, const uint4* bias,
                                                      const float* gamma, const float* beta, uint4* y, uint4* sum,
                                                      const Slice& slice) {
    __shared__ float4 found[THREADS];
    __shared__ float2 of_this_block[32], statistics[32];
    const int image = blockIdx.z, in_slice = threadIdx.x % slice.lanes, step = blockDim.x / slice.lanes;
    const int lane = blockIdx.y * slice.lanes + in_slice;
    const int first = blockIdx.x * slice.rows_per_block + threadIdx.x / slice.lanes;
    const int end = min((int)(blockIdx.x + 1) * slice.rows_per_block, slice.rows);
    const size_t start = (size_t)image * slice.rows * slice.row_lanes + lane;
    const int split = in_first_group(in_slice, slice.channels_per_group);
    uint4 held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int row = first + i * step;
        if (row < end) held[i] = x[start + (size_t)row * slice.row_lanes];
    }
    if (skip || bias) {
        Floats constant = {};
        if (bias) constant = floats(bias[lane]);
        if (slice.skip_rows == 1) add(constant, floats(skip[(size_t)image * slice.row_lanes + lane]));
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int row = first + i * step;
            if (row < end) {
                const size_t at = start + (size_t)row * slice.row_lanes;
                Floats values = floats(held[i]);
                if (slice.skip_rows > 1) add(values, floats(skip[at]));
                add(values, constant);
                held[i] = halves(values);
                if (sum) sum[at] = held[i];
            }
        }
    }
    if (HELD <= 4) {
        Floats sums = {}, squares = {};
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            if (first + i * step < end) add_to(sums, squares, floats(held[i]));
        }
        found[threadIdx.x] = by_group(sums, squares, split);
    } else {  // sixteen sums do not fit beside what is held
        float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            if (first + i * step < end) {
                Floats sums = {}, squares = {};
                add_to(sums, squares, floats(held[i]));
                const float4 mine = by_group(sums, squares, split);
                total = make_float4(total.x + mine.x, total.y + mine.y, total.z + mine.z, total.w + mine.w);
            }
        }
        found[threadIdx.x] = total;
    }
    __syncthreads();
    const int width = slice.channels_per_group;
    for (int group = threadIdx.x / 32; group < slice.groups; group += blockDim.x / 32) {
        const float2 total = of_group(found, group, width, slice.lanes, step);
        if (threadIdx.x % 32 == 0) of_this_block[group] = total;
    }
    wait_for_cluster();
    if (threadIdx.x < 32) {
        const int cluster = gridDim.x, group = threadIdx.x / cluster;
        float2 total = make_float2(0, 0);
        if (group < slice.groups) total = of_block(&of_this_block[group], threadIdx.x % cluster);
        for (int distance = cluster / 2; distance; distance /= 2) {
            total.x += __shfl_xor_sync(0xffffffffu, total.x, distance);
            total.y += __shfl_xor_sync(0xffffffffu, total.y, distance);
        }
        if (group < slice.groups && threadIdx.x % cluster == 0)
            statistics[group] = mean_and_scale(total, (float)slice.rows * width, slice.epsilon);
    }
    // This warp has used the others' sums. Behind __syncthreads() the compiler would load gamma and beta later, behind it too.
    arrive_in_cluster();
    __syncthreads();
    const int group = in_slice * VECTOR / width;
    Floats scale, shift;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
        const float2 own = statistics[j < split ? group : group + 1];
        scale.at[j] = own.y * gamma[lane * VECTOR + j];
        shift.at[j] = beta[lane * VECTOR + j] - own.x * scale.at[j];
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int row = first + i * step;
        if (row < end) y[start + (size_t)row * slice.row_lanes] = halves(normalized(floats(held[i]), scale, shift, slice.silu));
    }
    wait_for_arrivals();  // a block's sums stay until the others have read them
}

#define NORMALIZE_HELD(HELD, LIMIT)                                                                              \
    extern "C" __global__ void __launch_bounds__(LIMIT) group_norm_held_##HELD(                                  \
        const uint4* __restrict__ x, const uint4* __restrict__ skip, const uint4* __restrict__ bias,             \
        const float* __restrict__ gamma, const float* __restrict__ beta, uint4* __restrict__ y,                  \
        uint4* __restrict__ sum, const Slice slice) {                                                            \
        wait_for_earlier_kernels();                                                                              \
        normalize_held<HELD>(x, skip, bias, gamma, beta, y, sum, slice);                                         \
    }

NORMALIZE_HELD(4, THREADS)
NORMALIZE_HELD(8, THREADS)

#endif
