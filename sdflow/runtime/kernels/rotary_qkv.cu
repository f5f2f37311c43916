// What an attention reads, of the products that give it: bias added, heads of query and key RMS-normed and rotated, the tokens of
// one or two streams one after another. In float32, rounded once.

enum { ROTARY_QUERY, ROTARY_KEY, ROTARY_VALUE, ROTARY_PARTS };

// As in rotary_qkv.c. Sizes are in vectors of eight channels; pointers are null for what there is none of.
struct RotaryStream {
    const uint4* from[ROTARY_PARTS];  // at a product's first column for it
    const uint4* bias[ROTARY_PARTS];
    const uint4* weight[2];   // of the norms of query and key
    int pitch[ROTARY_PARTS];  // of a product's rows
    int tokens, first;        // of an image, and how many tokens of an image come before them
    int blocks;
};

struct RotaryAll {
    RotaryStream streams[2];
    const uint4 *cosine, *sine;
    uint4* to[ROTARY_PARTS];
    int images, tokens;      // tokens: of both streams
    int lanes, head, wide;   // of a row, of a head, of a block's part of a row
    int rows;                // that a block goes through
    int tables;              // tokens in the tables of an image; 0: the same tables for all images
    float epsilon;
};

// Over the threads of a head, which lie side by side: a power of two, at most a warp.
static __device__ __forceinline__ float rotary_sum(float value, int threads) {
    for (int distance = 1; distance < threads; distance *= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

template <class Type>
static __device__ __forceinline__ void rotary_norm(Floats& values, uint4 weight, int head, float epsilon) {
    float squares = 0;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) squares += values.at[j] * values.at[j];
    const float factor = rsqrtf(rotary_sum(squares, head) * __fdividef(1.0f, (float)(head * VECTOR)) + epsilon);
    const Floats weights = Type::floats_of(weight);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) values.at[j] *= factor * weights.at[j];
}

// Channels 2 j and 2 j + 1 are a point of a plane.
static __device__ __forceinline__ void rotary_turn(Floats& values, const Floats& cosine, const Floats& sine) {
#pragma unroll
    for (int j = 0; j < VECTOR; j += 2) {
        const float x = values.at[j], y = values.at[j + 1];
        values.at[j] = x * cosine.at[j] - y * sine.at[j];
        values.at[j + 1] = y * cosine.at[j + 1] + x * sine.at[j + 1];
    }
}

// Grid (parts of a row, blocks of the first stream and of the second one, what is made), block (whole warps, 1, 1): `wide` threads have
// a row's part, eight channels each, and go down the block's rows with what others have beside them.
template <class Type>
static __device__ __forceinline__ void rotary_qkv(const RotaryAll& all) {
    wait_for_earlier_kernels();
    const int part = (int)blockIdx.z;
    const bool second = (int)blockIdx.y >= all.streams[0].blocks;
    const RotaryStream& stream = all.streams[second];
    const int block = (int)blockIdx.y - (second ? all.streams[0].blocks : 0);
    const int deep = (int)blockDim.x / all.wide, down = (int)threadIdx.x / all.wide;
    const int lane = (int)blockIdx.x * all.wide + (int)threadIdx.x % all.wide;
    const int begin = block * all.rows, end = min(begin + all.rows, all.images * stream.tokens);
    const bool used = down < deep && lane < all.lanes;
    const uint4 nothing = make_uint4(0, 0, 0, 0);
    const uint4 *from = stream.from[part] + lane, *biases = stream.bias[part];
    const uint4* weights = part == ROTARY_VALUE ? nullptr : stream.weight[part];
    const bool turned = part != ROTARY_VALUE && all.cosine;
    const uint4 bias = used && biases ? biases[lane] : nothing;
    const uint4 weight = used && weights ? weights[lane % all.head] : nothing;
    const int pitch = stream.pitch[part];
    uint4 next = used && begin + down < end ? from[(size_t)(begin + down) * pitch] : nothing;
    for (int start = begin; start < end; start += deep) {  // the same for all threads: those of a head need one another
        const int row = start + down, image = row / stream.tokens, token = stream.first + row % stream.tokens;
        const bool there = used && row < end;
        uint4 cosine = nothing, sine = nothing;
        if (there && turned) {
            const size_t at = ((size_t)image * all.tables + token) * all.head + lane % all.head;
            cosine = all.cosine[at];
            sine = all.sine[at];
        }
        Floats values = Type::floats_of(next);
        if (used && row + deep < end) next = from[(size_t)(row + deep) * pitch];  // on its way while this one is computed
        if (biases) add(values, Type::floats_of(bias));
        if (weights) rotary_norm<Type>(values, weight, all.head, all.epsilon);
        if (turned) rotary_turn(values, Type::floats_of(cosine), Type::floats_of(sine));
        if (there) all.to[part][((size_t)image * all.tokens + token) * all.lanes + lane] = Type::rounded(values);
    }
}

extern "C" __global__ void __launch_bounds__(ROTARY_THREADS, ROTARY_PER_PROCESSOR)
rotary_qkv_float16(const __grid_constant__ RotaryAll all) {
    rotary_qkv<Half>(all);
}

extern "C" __global__ void __launch_bounds__(ROTARY_THREADS, ROTARY_PER_PROCESSOR)
rotary_qkv_bfloat16(const __grid_constant__ RotaryAll all) {
    rotary_qkv<Bfloat16>(all);
}
