// Group normalization of float16 in NHWC, with what Stable Diffusion has around it: what is added before, SiLU after.
//
// y = act(gamma * (s - mean) / sqrt(var + epsilon) + beta) with s = x + skip + bias, mean and var over a group's channels
// and all positions of an image; statistics in float32, s and y float16.
//
// A thread has eight neighbouring channels (16 bytes) and several positions in flight, so that memory is busy; ONNX
// Runtime's kernels take two channels and one position at a time. There are two ways:
//
// Images that fit into the registers of all multiprocessors, as all of the UNet's do, are read once (group_norm_held). A
// cluster of blocks has some whole groups of an image; its blocks tell each other their sums.
//
// Of larger ones, and before compute capability 9.0, a kernel reads the images and writes, for each of its blocks, the
// sums and the sums of squares of each group (group_norm_sums); another adds them up and normalizes (group_norm_apply).
//
// Sums are taken in the same order every time.

#define IN_FLIGHT 4

// The eight channels' images are (images, rows, lanes): rows are positions, lanes channels / VECTOR.
struct Layout {
    int rows, lanes, channels_per_group, groups;
    int rows_per_block;  // of this kernel
    int skip_rows;       // rows of skip: as many as of x, 1 when it holds for all positions, 0 when there is none
};

// What is the same at all positions: the bias, and a skip of one row.
static __device__ __forceinline__ Floats constant_part(const uint4* skip, const uint4* bias, const Layout& layout,
                                                       int image, int lane) {
    Floats result = {};
    if (bias) result = floats(bias[lane]);
    if (layout.skip_rows == 1) add(result, floats(skip[(size_t)image * layout.lanes + lane]));
    return result;
}

static __device__ __forceinline__ Floats summed(uint4 x, uint4 skip, const Floats& constant, bool with_skip) {
    Floats result = floats(x);
    add(result, constant);
    if (with_skip) add(result, floats(skip));
    return result;
}

// How many of the lane's channels belong to the group of its first one; the others belong to the next group.
static __device__ __forceinline__ int in_first_group(int lane, int channels_per_group) {
    const int first = lane * VECTOR;
    return min(VECTOR, (first / channels_per_group + 1) * channels_per_group - first);
}

static __device__ __forceinline__ void add_to(Floats& sums, Floats& squares, const Floats& values) {
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
        sums.at[j] += values.at[j];
        squares.at[j] += values.at[j] * values.at[j];
    }
}

// (sum, squares) of the first channel's group, and of the next one.
static __device__ __forceinline__ float4 by_group(const Floats& sums, const Floats& squares, int split) {
    float4 found = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
        if (j < split) {
            found.x += sums.at[j];
            found.y += squares.at[j];
        } else {
            found.z += sums.at[j];
            found.w += squares.at[j];
        }
    }
    return found;
}

// A warp's sum over what the block's threads found of one of its groups, `by_group`.
static __device__ __forceinline__ float2 of_group(const float4* found, int group, int width, int row_lanes, int rows) {
    const int first = group * width / VECTOR, lanes = (group * width + width - 1) / VECTOR - first + 1;
    float2 total = make_float2(0, 0);
    for (int i = threadIdx.x % 32; i < lanes * rows; i += 32) {
        const int from = first + i % lanes;
        const float4 theirs = found[i / lanes * row_lanes + from];
        const bool begins_here = from * VECTOR / width == group;
        total.x += begins_here ? theirs.x : theirs.z;
        total.y += begins_here ? theirs.y : theirs.w;
    }
#pragma unroll
    for (int distance = 16; distance; distance /= 2) {
        total.x += __shfl_xor_sync(0xffffffffu, total.x, distance);
        total.y += __shfl_xor_sync(0xffffffffu, total.y, distance);
    }
    return total;
}

// From a group's sum and sum of squares: its mean, and 1 / its deviation.
static __device__ __forceinline__ float2 mean_and_scale(float2 total, float count, float epsilon) {
    const float mean = total.x / count;
    return make_float2(mean, rsqrtf(fmaxf(total.y / count - mean * mean, 0.0f) + epsilon));
}

static __device__ __forceinline__ Floats normalized(const Floats& values, const Floats& scale, const Floats& shift,
                                                    int silu) {
    Floats result;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
        const float value = values.at[j] * scale.at[j] + shift.at[j];
        result.at[j] = silu ? __fdividef(value, 1.0f + __expf(-value)) : value;
    }
    return result;
}

// Grid (blocks, images), block: a multiple of 32, at least `lanes` threads. partials: (images, blocks, groups, 2).
// sum: where s is kept, or null.
extern "C" __global__ void __launch_bounds__(THREADS)
group_norm_sums(const uint4* __restrict__ x, const uint4* __restrict__ skip, const uint4* __restrict__ bias,
                uint4* __restrict__ sum, float2* __restrict__ partials, const Layout layout) {
    __shared__ float4 found[THREADS];
    const int image = blockIdx.y, lane = threadIdx.x % layout.lanes, row = threadIdx.x / layout.lanes;
    const int step = blockDim.x / layout.lanes;
    const bool with_skip = layout.skip_rows > 1;
    if (row < step) {
        const int end = min((int)(blockIdx.x + 1) * layout.rows_per_block, layout.rows);
        const size_t start = (size_t)image * layout.rows * layout.lanes + lane;
        const Floats constant = constant_part(skip, bias, layout, image, lane);
        Floats sums = {}, squares = {};
        for (int first = blockIdx.x * layout.rows_per_block + row; first < end; first += IN_FLIGHT * step) {
            uint4 read[IN_FLIGHT], read_skip[IN_FLIGHT];
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
                    const uint4 rounded = halves(values);
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
extern "C" __global__ void __launch_bounds__(THREADS)
group_norm_apply(const uint4* __restrict__ x, const uint4* __restrict__ skip, const uint4* __restrict__ bias,
                 const float* __restrict__ gamma, const float* __restrict__ beta, const float2* __restrict__ partials,
                 uint4* __restrict__ y, const Layout layout, int parts, float epsilon, int silu) {
    __shared__ float2 found[THREADS];
    __shared__ float2 statistics[32];  // mean, 1 / deviation
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
        uint4 read[IN_FLIGHT], read_skip[IN_FLIGHT];
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
            y[start + (size_t)at * layout.lanes] = halves(normalized(values, scale, shift, silu));
        }
    }
}

#if __CUDA_ARCH__ >= 900

// Some whole groups of the images: `lanes` of a row's `row_lanes`, for each blockIdx.y.
struct Slice {
    int rows, row_lanes, lanes, channels_per_group, groups;
    int rows_per_block, skip_rows, silu;
    float epsilon;
};

static __device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

static __device__ __forceinline__ float2 of_block(const float2* shared, int rank) {
    unsigned address = (unsigned)__cvta_generic_to_shared(shared);
    float2 value;
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
    return value;
}

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
    wait_for_cluster();  // a block's sums stay until the others have read them
}

#define NORMALIZE_HELD(HELD, LIMIT)                                                                              \
    extern "C" __global__ void __launch_bounds__(LIMIT) group_norm_held_##HELD(                                  \
        const uint4* __restrict__ x, const uint4* __restrict__ skip, const uint4* __restrict__ bias,             \
        const float* __restrict__ gamma, const float* __restrict__ beta, uint4* __restrict__ y,                  \
        uint4* __restrict__ sum, const Slice slice) {                                                            \
        normalize_held<HELD>(x, skip, bias, gamma, beta, y, sum, slice);                                         \
    }

NORMALIZE_HELD(4, THREADS)
NORMALIZE_HELD(8, THREADS)

#endif
