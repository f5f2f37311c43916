// Group normalization of float16 in NHWC, with what Stable Diffusion has around it: what is added before, SiLU after.
//
// y = act(gamma * (s - mean) / sqrt(var + epsilon) + beta) with s = x + skip + bias, mean and var over a group's channels
// and all positions of an image; statistics in float32, s and y float16.
//
// Two kernels. The first reads the images and writes, for each of its blocks, the sums and the sums of squares of each
// group; the second adds them up, in the same order every time, and normalizes. A thread has eight neighbouring channels
// (16 bytes) and several positions in flight, so that memory is busy; ONNX Runtime's kernels take two channels and one
// position at a time. No headers: NVRTC compiles this where no CUDA toolkit is installed.

#define VECTOR 8
#define IN_FLIGHT 4

// The eight channels' images are (images, rows, lanes): rows are positions, lanes channels / VECTOR.
struct Layout {
    int rows, lanes, channels_per_group, groups;
    int rows_per_block;  // of this kernel
    int skip_rows;       // rows of skip: as many as of x, 1 when it holds for all positions, 0 when there is none
};

struct Floats {
    float at[VECTOR];
};

static __device__ __forceinline__ float2 unpacked(unsigned pair) {
    float2 result;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(result.x), "=f"(result.y) : "r"(pair));
    return result;
}

static __device__ __forceinline__ unsigned packed(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

static __device__ __forceinline__ Floats floats(uint4 halves) {
    const unsigned pairs[4] = {halves.x, halves.y, halves.z, halves.w};
    Floats result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 both = unpacked(pairs[i]);
        result.at[2 * i] = both.x;
        result.at[2 * i + 1] = both.y;
    }
    return result;
}

static __device__ __forceinline__ uint4 halves(const Floats& values) {
    return make_uint4(packed(values.at[0], values.at[1]), packed(values.at[2], values.at[3]),
                      packed(values.at[4], values.at[5]), packed(values.at[6], values.at[7]));
}

static __device__ __forceinline__ void add(Floats& to, const Floats& value) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) to.at[i] += value.at[i];
}

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
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) {
                    sums.at[j] += values.at[j];
                    squares.at[j] += values.at[j] * values.at[j];
                }
            }
        }
        const int split = in_first_group(lane, layout.channels_per_group);
        float4 mine = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            if (j < split) {
                mine.x += sums.at[j];
                mine.y += squares.at[j];
            } else {
                mine.z += sums.at[j];
                mine.w += squares.at[j];
            }
        }
        found[threadIdx.x] = mine;
    }
    __syncthreads();
    const int width = layout.channels_per_group;
    for (int group = threadIdx.x / 32; group < layout.groups; group += blockDim.x / 32) {
        const int first = group * width / VECTOR, lanes = (group * width + width - 1) / VECTOR - first + 1;
        float total = 0, squares = 0;
        for (int i = threadIdx.x % 32; i < lanes * step; i += 32) {
            const int from = first + i % lanes;
            const float4 theirs = found[i / lanes * layout.lanes + from];
            const bool begins_here = from * VECTOR / width == group;
            total += begins_here ? theirs.x : theirs.z;
            squares += begins_here ? theirs.y : theirs.w;
        }
#pragma unroll
        for (int distance = 16; distance; distance /= 2) {
            total += __shfl_xor_sync(0xffffffffu, total, distance);
            squares += __shfl_xor_sync(0xffffffffu, squares, distance);
        }
        if (threadIdx.x % 32 == 0)
            partials[((size_t)image * gridDim.x + blockIdx.x) * layout.groups + group] = make_float2(total, squares);
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
            const float count = (float)layout.rows * layout.channels_per_group;
            const float mean = total.x / count;
            statistics[group] = make_float2(mean, rsqrtf(fmaxf(total.y / count - mean * mean, 0.0f) + epsilon));
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
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                const float value = values.at[j] * scale.at[j] + shift.at[j];
                values.at[j] = silu ? __fdividef(value, 1.0f + __expf(-value)) : value;
            }
            y[start + (size_t)at * layout.lanes] = halves(values);
        }
    }
}
