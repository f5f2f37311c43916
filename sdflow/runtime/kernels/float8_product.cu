// y = a b^T of E4M3, with scales of a's rows and of b's, which are y's columns: sums in float32, y in float16, or in bfloat16 where
// no gates are computed. a: (m, k), b: (n, k).
//
// One thread of a block has the copy engine bring tiles of 128 along K, as far ahead as shared memory has places, and two
// warpgroups multiply them. A block goes from tile to tile of y. The warpgroups have a half of a tile each; or, as always where
// gates are computed too, they take turns, so that one of them multiplies while the other one writes.
// Clusters of blocks that bring tiles for each other were no quicker on an H200.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define FLOAT8_DEPTH 128    // bytes along K, a row of a tile
#define FLOAT8_COLUMNS 160  // of b's tile; of 128, 192 and 256 all but the widest products of SDXL were slower
#define FLOAT8_ROWS 128

struct Float8Size {
    int rows, columns, depth;  // of y; of a
};

// A place: a tile of a, and one of b behind it. Behind all places are the barriers.
struct Float8Places {
    static constexpr int A = FLOAT8_ROWS * FLOAT8_DEPTH, B = FLOAT8_COLUMNS * FLOAT8_DEPTH;
    unsigned at, full, empty, turns;

    __device__ __forceinline__ Float8Places() {
        at = dynamic_shared();
        full = at + FLOAT8_STAGES * (A + B);
        empty = full + 8 * FLOAT8_STAGES;
        turns = empty + 8 * FLOAT8_STAGES;
    }
    __device__ __forceinline__ unsigned a(int stage) const { return at + stage * (A + B); }
    __device__ __forceinline__ unsigned b(int stage) const { return a(stage) + A; }
};

// GATED: the product has values, then as many gates, and y is (value + bias) * gelu(gate + bias). A tile has the same columns of
// both, so that a thread has a value and its gate.
template <bool GATED>
struct Float8Tiles {
    static constexpr int HALVES = GATED ? 2 : 1, WIDTH = FLOAT8_COLUMNS / HALVES;  // columns of y's tile
    int down, count;

    __device__ __forceinline__ Float8Tiles(const Float8Size& size) {
        down = (size.rows + FLOAT8_ROWS - 1) / FLOAT8_ROWS;
        count = down * ((size.columns + WIDTH - 1) / WIDTH);
    }
    __device__ __forceinline__ int row(int i) const { return i % down * FLOAT8_ROWS; }
    __device__ __forceinline__ int column(int i) const { return i / down * WIDTH; }
};

template <bool GATED>
static __device__ __forceinline__ void bring_tiles(const TensorMap& a, const TensorMap& b, const Float8Places& places,
                                                   const Float8Tiles<GATED>& tiles, int steps, const Float8Size& size) {
    int stage = 0, phase = 0;
    for (int i = blockIdx.x; i < tiles.count; i += gridDim.x) {
        const int row = tiles.row(i), column = tiles.column(i);
        for (int at = 0; at < steps; ++at) {
            const unsigned full = places.full + 8 * stage;
            wait_for_phase(places.empty + 8 * stage, phase ^ 1);
            arrive_and_expect(full, Float8Places::A + Float8Places::B);
            load_tile(places.a(stage), &a, at * FLOAT8_DEPTH, row, full);
            load_tile(places.b(stage), &b, at * FLOAT8_DEPTH, column, full);
            if (GATED) load_tile(places.b(stage) + Float8Places::B / 2, &b, at * FLOAT8_DEPTH, size.columns + column, full);
            if (++stage == FLOAT8_STAGES) stage = 0, phase ^= 1;
        }
    }
}

// Four neighbouring threads have a fourth of each of four vectors. The first one gets the first vector, and so on.
static __device__ __forceinline__ void exchange(unsigned (&v)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const unsigned got = __shfl_xor_sync(~0u, odd ? v[i] : v[i + 1], 1);
        if (odd) v[i] = got;
        else v[i + 1] = got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned got = __shfl_xor_sync(~0u, high ? v[i] : v[i + 2], 2);
        if (high) v[i] = got;
        else v[i + 2] = got;
    }
}

// Of two vectors, the threads with even numbers get a half of the first one each, the others of the second.
static __device__ __forceinline__ void exchange(unsigned (&v)[2]) {
    const bool odd = threadIdx.x & 1;
    const unsigned got = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1);
    if (odd) v[0] = got;
    else v[1] = got;
}

// What belongs to a thread's columns of y, two of each eight, four of these eights; of values, then of their gates.
template <bool GATED, bool BFLOAT16>
struct Float8Columns {
    static constexpr int HALVES = GATED ? 2 : 1, EIGHTS = FLOAT8_COLUMNS / 8 / HALVES;  // of y's tile
    float2 scales[HALVES][4];
    unsigned bias[HALVES][4];

    __device__ __forceinline__ void load(int column, const Float8Size& size, const float* __restrict__ column_scales,
                                         const unsigned* __restrict__ given_bias) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = column + i * 8 < size.columns ? column + i * 8 + threadIdx.x % 4 * 2 : 0;
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                scales[half][i] = *(const float2*)(column_scales + half * size.columns + at);
                if constexpr (GATED) bias[half][i] = given_bias[(half * size.columns + at) / 2];
            }
        }
    }

    // The pair of y in the eight with this number; sums: of `multiply_eights`, from the row's first of these four eights on.
    __device__ __forceinline__ unsigned pair(const float* sums, int i, float by) const {
        const float2 scale = scales[0][i], value = make_float2(sums[4 * i] * by * scale.x, sums[4 * i + 1] * by * scale.y);
        if constexpr (GATED) {
            const float2 gate_scale = scales[1][i], value_bias = unpacked(bias[0][i]), gate_bias = unpacked(bias[1][i]);
            const float* gate = sums + 4 * (i + EIGHTS);
            return packed((value.x + value_bias.x) * quick_gelu(gate[0] * by * gate_scale.x + gate_bias.x),
                          (value.y + value_bias.y) * quick_gelu(gate[1] * by * gate_scale.y + gate_bias.y));
        } else {
            return BFLOAT16 ? packed_bfloat16(value.x, value.y) : packed(value.x, value.y);
        }
    }

    // Of a row, the four eights from this place of y on, or the two that are left at a tile's end. left: columns.
    template <int COUNT>
    __device__ __forceinline__ void write(const float* sums, float by, uint4* __restrict__ y, size_t place, int left) const {
        const int quarter = threadIdx.x % 4;
        unsigned pairs[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) pairs[i] = pair(sums, i, by);
        exchange(pairs);
        const int at = COUNT == 4 ? quarter * 8 : quarter % 2 * 8 + quarter / 2 * 4;
        if (at >= left) return;
        if constexpr (COUNT == 4) y[(place + at) / 8] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        else ((uint2*)y)[(place + at) / 4] = make_uint2(pairs[0], pairs[1]);
    }
};

// TURNS: a warpgroup multiplies whole tiles, every second one; else a half of each, 64 rows.
template <bool GATED, bool TURNS, bool BFLOAT16>
static __device__ __forceinline__ void multiply_tiles(const Float8Places& places, const Float8Tiles<GATED>& tiles, int steps,
                                                      const Float8Size& size, const float* __restrict__ row_scales,
                                                      const float* __restrict__ column_scales, const unsigned* __restrict__ bias,
                                                      uint4* __restrict__ y) {
    constexpr int HIGH = TURNS ? 2 : 1;  // 64 rows, how often
    constexpr int EIGHTS = Float8Columns<GATED, BFLOAT16>::EIGHTS, FOURS = (EIGHTS + 3) / 4, AHEAD = TURNS ? 0 : FOURS;
    const int group = threadIdx.x / WARPGROUP - 1, lane = threadIdx.x % 32, first_row = TURNS ? 0 : group * 64;
    int before = TURNS ? group * steps : 0;  // steps of this block
    int stage = before % FLOAT8_STAGES, phase = before / FLOAT8_STAGES & 1, turn = group ^ 1;
    for (int i = blockIdx.x + (TURNS ? group * gridDim.x : 0); i < tiles.count; i += (TURNS ? 2 : 1) * gridDim.x) {
        float sums[HIGH][FLOAT8_COLUMNS / 2];
        if (TURNS) {  // not before the other one has seen its places full: until then they may be a phase behind
            wait_for_phase(places.turns + 8 * group, turn);
            turn ^= 1;
        }
        int last = 0;
        for (int at = 0; at < steps; ++at) {
            wait_for_phase(places.full + 8 * stage, phase);
            begin_products();
#pragma unroll
            for (int k = 0; k < FLOAT8_DEPTH / 32; ++k)
#pragma unroll
                for (int h = 0; h < HIGH; ++h)
                    multiply_eights(sums[h], matrix(places.a(stage) + (first_row + h * 64) * FLOAT8_DEPTH + k * 32, 16, 1024),
                                    matrix(places.b(stage) + k * 32, 16, 1024), at || k);
            commit_products();
            wait_for_products<1>();
            if (at && lane == 0) arrive(places.empty + 8 * last);
            last = stage;
            if (++stage == FLOAT8_STAGES) stage = 0, phase ^= 1;
        }
        if (TURNS && lane == 0) arrive(places.turns + 8 * (group ^ 1));
        const int column = tiles.column(i), row = tiles.row(i) + first_row + threadIdx.x % WARPGROUP / 32 * 16 + lane / 4;
        Float8Columns<GATED, BFLOAT16> columns[FOURS];
#pragma unroll
        for (int four = 0; four < AHEAD; ++four) columns[four].load(column + four * 32, size, column_scales, bias);
        float by[2 * HIGH];
#pragma unroll
        for (int r = 0; r < 2 * HIGH; ++r) by[r] = row_scales[min(row + r / 2 * 64 + r % 2 * 8, size.rows - 1)];
        wait_for_products<0>();
        if (lane == 0) arrive(places.empty + 8 * last);
#pragma unroll
        for (int four = 0; four < FOURS; ++four) {
            if (four + AHEAD < FOURS) columns[four + AHEAD].load(column + (four + AHEAD) * 32, size, column_scales, bias);
#pragma unroll
            for (int r = 0; r < 2 * HIGH; ++r) {
                const int at = row + r / 2 * 64 + r % 2 * 8, left = at < size.rows ? size.columns - column - four * 32 : 0;
                const size_t place = (size_t)at * size.columns + column + four * 32;
                const float* const from = &sums[r / 2][four * 16 + r % 2 * 2];
                if (four < EIGHTS / 4) columns[four].template write<4>(from, by[r], y, place, left);
                else columns[four].template write<2>(from, by[r], y, place, left);
            }
        }
        if (TURNS) {  // the other one's tile comes between
            before += 2 * steps;
            stage = before % FLOAT8_STAGES, phase = before / FLOAT8_STAGES & 1;
        }
    }
}

template <bool GATED, bool TURNS, bool BFLOAT16>
static __device__ __forceinline__ void float8_product_of(const TensorMap& a, const TensorMap& b, const float* __restrict__ row_scales,
                                                         const float* __restrict__ column_scales, const unsigned* __restrict__ bias,
                                                         uint4* __restrict__ y, const Float8Size& size) {
    const Float8Places places;
    const Float8Tiles<GATED> tiles(size);
    const int steps = (size.depth + FLOAT8_DEPTH - 1) / FLOAT8_DEPTH;
    if (threadIdx.x == 0) {
        for (int i = 0; i < FLOAT8_STAGES; ++i) {
            make_barrier(places.full + 8 * i, 1);
            make_barrier(places.empty + 8 * i, TURNS ? 4 : 8);  // the warps that read it
        }
        for (int i = 0; i < 2; ++i) make_barrier(places.turns + 8 * i, 4);
        barriers_are_made();
        prefetch(&a), prefetch(&b);
    }
    __syncthreads();
    wait_for_earlier_kernels();
    if (threadIdx.x < WARPGROUP) {
        leave_registers<40>();
        if (threadIdx.x == 0) bring_tiles(a, b, places, tiles, steps, size);
    } else {
        take_registers<232>();
        multiply_tiles<GATED, TURNS, BFLOAT16>(places, tiles, steps, size, row_scales, column_scales, bias, y);
    }
}

#define FLOAT8_PRODUCT(NAME, TURNS, BFLOAT16)                                                                             \
    extern "C" __global__ void __launch_bounds__(3 * WARPGROUP, 1)                                                        \
    NAME(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const float* __restrict__ row_scales,  \
         const float* __restrict__ column_scales, uint4* __restrict__ y, const Float8Size size) {                         \
        float8_product_of<false, TURNS, BFLOAT16>(a, b, row_scales, column_scales, nullptr, y, size);                     \
    }

FLOAT8_PRODUCT(float8_product, false, false)
FLOAT8_PRODUCT(float8_product_bfloat16, false, true)
FLOAT8_PRODUCT(float8_product_in_turns, true, false)
FLOAT8_PRODUCT(float8_product_in_turns_bfloat16, true, true)

// bias: pairs of halves.
extern "C" __global__ void __launch_bounds__(3 * WARPGROUP, 1)
float8_gated_product(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const float* __restrict__ row_scales,
                     const float* __restrict__ column_scales, const unsigned* __restrict__ bias, uint4* __restrict__ y,
                     const Float8Size size) {
    float8_product_of<true, true, false>(a, b, row_scales, column_scales, bias, y, size);
}

#endif
