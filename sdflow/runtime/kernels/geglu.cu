// y = (x w + b)[:, :n] * gelu((x w + b)[:, n:]): a product with its gate (GEGLU, Shazeer 2020), float16, computed in float32.
//
// The scheme is CUTLASS's for Hopper. A block stays and goes from tile to tile: one thread has the copy engine load slices of x
// and w, stage after stage, and two warpgroups multiply what has come. A tile takes the same columns of both halves of w, so that
// a thread has a value and its gate. Two ways: tiles of 128 columns, of which each warpgroup has half of the rows; and tiles of
// 64 columns, of which each has every second one, so that it computes gates while the other one multiplies.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define GEGLU_ROWS 128                      // of a tile
#define GEGLU_DEPTH 64                      // of a stage
#define GEGLU_PANEL (64 * GEGLU_DEPTH * 2)  // bytes of 64 rows of x, or of 64 columns of w

struct GegluSize {
    int rows, width, depth, band;  // of x and y; of y; of x; how many tiles follow down before the next columns
};

// First row and column of the tile with this number.
template <int WIDTH>
struct GegluTile {
    int row, column;
    __device__ __forceinline__ GegluTile(const GegluSize& size, int index) {
        const int down = (size.rows + GEGLU_ROWS - 1) / GEGLU_ROWS, across = size.width / WIDTH;
        const int begin = index / (size.band * across) * size.band, rest = index % (size.band * across);
        const int high = min(size.band, down - begin);
        row = (begin + rest % high) * GEGLU_ROWS;
        column = rest / high * WIDTH;
    }
};

// x (rows, depth) in boxes of 64 columns and 128 rows, w (depth, 2 width) and y (rows, width) in boxes of 64 and 64. bias: pairs of
// halves.
template <bool WIDE>
static __device__ __forceinline__ void multiply_and_gate(const TensorMap& x, const TensorMap& w, const TensorMap& y,
                                                         const unsigned* bias, const GegluSize& size) {
    constexpr int WIDTH = WIDE ? 128 : 64, PARTS = WIDE ? 1 : 2;  // of 64 rows, that a warpgroup has of a tile
    constexpr int PANELS = 2 * WIDTH / 64, A = 2 * GEGLU_PANEL, STAGE = A + PANELS * GEGLU_PANEL, STAGES = 4 * 6 * GEGLU_PANEL / STAGE;
    constexpr int OUT = 2 * 64 * 64 * 2, BIAS = 2 * WIDTH * 2, MOST_BIAS = 512;  // bytes of a warpgroup
    const unsigned stages = dynamic_shared(), outs = stages + STAGES * STAGE, biases = outs + 2 * OUT;
    const unsigned full = biases + 2 * MOST_BIAS, empty = full + 8 * STAGES;
    const int steps = (size.depth + GEGLU_DEPTH - 1) / GEGLU_DEPTH;
    const int tiles = (size.rows + GEGLU_ROWS - 1) / GEGLU_ROWS * (size.width / WIDTH), next = gridDim.x;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            make_barrier(full + 8 * i, 1);
            make_barrier(empty + 8 * i, WIDE ? 2 : 1);  // the warpgroups that multiply it
        }
        barriers_are_made();
        prefetch(&x), prefetch(&w), prefetch(&y);
    }
    __syncthreads();
    wait_for_earlier_kernels();
    int stage = 0, phase = 0;
    const auto advance = [&] {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    };
    const auto pass_tile = [&] {  // that the other warpgroup has
        stage += steps;
        phase ^= stage / STAGES & 1;
        stage %= STAGES;
    };
    if (threadIdx.x < WARPGROUP) {
        leave_registers<40>();
        for (int index = blockIdx.x; threadIdx.x == 0 && index < tiles; index += next) {
            const GegluTile<WIDTH> tile(size, index);
            for (int step = 0; step < steps; ++step, advance()) {
                const unsigned a = stages + stage * STAGE, ready = full + 8 * stage;
                wait_for_phase(empty + 8 * stage, phase ^ 1);
                arrive_and_expect(ready, STAGE);
                load_tile(a, &x, step * GEGLU_DEPTH, tile.row, ready);
#pragma unroll
                for (int i = 0; i < PANELS; ++i) {  // first those of the values, then those of their gates
                    const int column = tile.column + i % (PANELS / 2) * 64 + i / (PANELS / 2) * size.width;
                    load_tile(a + A + i * GEGLU_PANEL, &w, column, step * GEGLU_DEPTH, ready);
                }
            }
        }
    } else {
        take_registers<232>();
        const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP, lane = thread % 32;
        const int mine = 1 + group, turn = 3 + group, turn_of_other = 4 - group;  // barriers
        const unsigned out = outs + group * OUT, with = biases + group * MOST_BIAS;
        const unsigned row = out + (thread / 32 * 16 + lane % 16) * 128, bias_of_lane = with + lane % 4 * 4;
        const int every = WIDE ? next : 2 * next;
        float sums[PARTS][WIDTH];
        if (!WIDE && group) {
            signal(turn_of_other, 2 * WARPGROUP);
            pass_tile();
        }
        for (int index = blockIdx.x + (WIDE ? 0 : group * next); index < tiles; index += every) {
            const GegluTile<WIDTH> tile(size, index);
            if (thread < WIDTH) {
                const int gates = thread / (WIDTH / 2);
                copy_word(with + thread * 4, bias + (tile.column + gates * size.width) / 2 + thread % (WIDTH / 2));
            }
            if (!WIDE) meet(turn, 2 * WARPGROUP);
            int last = 0;
            for (int step = 0; step < steps; ++step, advance()) {
                const unsigned a = stages + stage * STAGE + (WIDE ? group * GEGLU_PANEL : 0), b = stages + stage * STAGE + A;
                wait_for_phase(full + 8 * stage, phase);
                begin_products();
#pragma unroll
                for (int k = 0; k < GEGLU_DEPTH / 16; ++k)
#pragma unroll
                    for (int part = 0; part < PARTS; ++part)
                        multiply(sums[part], matrix(a + part * GEGLU_PANEL + k * 32, 16, 1024),
                                 matrix(b + k * 2048, GEGLU_PANEL, 1024), step || k);
                commit_products();
                wait_for_products<1>();
                if (step && thread == 0) arrive(empty + 8 * last);
                last = stage;
            }
            if (!WIDE && index + next < tiles) signal(turn_of_other, 2 * WARPGROUP);
            wait_for_products<0>();
            if (thread == 0) arrive(empty + 8 * last);
            if (!WIDE) pass_tile();
            wait_for_words();
            if (thread == 0) wait_for_reads();
            meet(mine, WARPGROUP);
            unsigned value_bias[WIDTH / 8], gate_bias[WIDTH / 8];
#pragma unroll
            for (int i = 0; i < WIDTH / 8; ++i) {
                value_bias[i] = word_at(bias_of_lane + i * 16);
                gate_bias[i] = word_at(bias_of_lane + i * 16 + BIAS / 2);
            }
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int i = 0; i < WIDTH / 8; i += 2) {  // of eight columns each
                    unsigned pairs[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float *value = &sums[part][4 * i + 2 * j], *gate = value + WIDTH / 2;
                        const float2 p = unpacked(value_bias[i + j / 2]), q = unpacked(gate_bias[i + j / 2]);
                        pairs[j] = packed((value[0] + p.x) * quick_gelu(gate[0] + q.x), (value[1] + p.y) * quick_gelu(gate[1] + q.y));
                    }
                    const int panel = WIDE ? i / 8 : part;
                    store_matrices(row + panel * 8192 + (((i + lane / 16) % 8) ^ (lane % 8)) * 16, pairs);
                }
            show_to_stores();
            meet(mine, WARPGROUP);
            if (thread == 0) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    store_tile(&y, tile.column + (WIDE ? i * 64 : 0), tile.row + (WIDE ? group : i) * 64, out + i * 8192);
                commit_stores();
            }
        }
        if (thread == 0) wait_for_stores();
    }
}

extern "C" __global__ void __launch_bounds__(3 * WARPGROUP, 1)
geglu_wide(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap y,
           const unsigned* __restrict__ bias, const GegluSize size) {
    multiply_and_gate<true>(x, w, y, bias, size);
}

extern "C" __global__ void __launch_bounds__(3 * WARPGROUP, 1)
geglu_in_turns(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap y,
               const unsigned* __restrict__ bias, const GegluSize size) {
    multiply_and_gate<false>(x, w, y, bias, size);
}

#endif
