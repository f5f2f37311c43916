// Group normalization of float16 in NHWC, with what Stable Diffusion has around it: what is added before, SiLU after.
//
// y = act(gamma * (s - mean) / sqrt(var + epsilon) + beta) with s = x + skip + bias, mean and var over a group's channels
// and all positions of an image; statistics in float32, s and y float16.
//
// A thread has eight neighbouring channels (16 bytes) and several positions in flight, so that memory is busy; ONNX
// Runtime's kernels take two channels and one position at a time. There are two ways:
//
// Images that fit into the registers of all multiprocessors, as all of the UNet's do, are read once (group_norm_held.cu). A
// cluster of blocks has some whole groups of an image; its blocks tell each other their sums.
//
// Of larger ones, and before compute capability 9.0, a kernel reads the images and writes, for each of its blocks, the
// sums and the sums of squares of each group, and another adds them up and normalizes (group_norm_twice.cu).
//
// Sums are taken in the same order every time.

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
