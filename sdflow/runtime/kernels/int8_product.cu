// Products of int8 rows with scales: y = rows weight^T in int32, exact, times the scales of row and column, plus a bias.
//
// A block has a tile of y of 128 rows and 64 columns for each of its warps in a row, of which there are two rows: 64 by 64 sums for
// each warp. Tiles of rows and weight, 64 bytes deep, wait in shared memory: on compute capability 8.0 and up they are copied
// asynchronously while earlier ones are multiplied, on 7.5 they pass through registers.

#define INT8_DOWN 128
#define INT8_PART 64   // rows and columns of a warp
#define INT8_DEPTH 64  // bytes of a row in shared memory, four chunks of 16
#define INT8_GROUP 8   // rows of tiles that blocks go down before they go to the next column

// rows (rows, depth), weight (columns, depth), y (rows, columns). depth: a multiple of 16, columns: of 8.
struct Int8Size {
    int rows, columns, depth;
};

struct Int8Operands {
    const uint4 *rows, *weight;
    const float *row_scales, *weight_scales;
    const unsigned* bias;  // null without
    uint4* y;
};

// Where a chunk of a tile's row is: eight rows' same chunks lie in different banks.
static __device__ __forceinline__ unsigned chunk_at(int row, int chunk) {
    return row * INT8_DEPTH + ((chunk ^ (row >> 1 & 3)) << 4);
}

template <class Type>
static __device__ __forceinline__ float2 pair_of(unsigned pair);
template <class Type>
static __device__ __forceinline__ unsigned pair_in(float low, float high);
template <>
__device__ __forceinline__ float2 pair_of<Half>(unsigned pair) {
    return unpacked(pair);
}
template <>
__device__ __forceinline__ unsigned pair_in<Half>(float low, float high) {
    return packed(low, high);
}
#if __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ float2 pair_of<Bfloat16>(unsigned pair) {
    return make_float2(__int_as_float(pair << 16), __int_as_float(pair & 0xffff0000u));
}
template <>
__device__ __forceinline__ unsigned pair_in<Bfloat16>(float low, float high) {
    return packed_bfloat16(low, high);
}
#endif

// Lane i of each four gets what they have in place i, in the lanes' order.
static __device__ __forceinline__ void transpose_of_four(unsigned (&words)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, odd ? words[i] : words[i + 1], 1);
        if (odd) words[i] = other;
        else words[i + 1] = other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i + 2], 2);
        if (upper) words[i] = other;
        else words[i + 2] = other;
    }
}

template <class Type, bool AMPERE, int ACROSS, int STAGES>
struct Int8Tile {
    static constexpr int COLUMNS = INT8_PART * ACROSS, BLOCK = 64 * ACROSS;
    static constexpr int STAGE = (INT8_DOWN + COLUMNS) * INT8_DEPTH;  // bytes
    static constexpr int COPIES = STAGE / 16 / BLOCK, OF_ROWS = INT8_DOWN * 4 / BLOCK;  // chunks of a thread

    const Int8Operands& of;
    const Int8Size& size;
    int first_row, first_column;
    unsigned memory;
    int sums[4][8][4];

    __device__ __forceinline__ Int8Tile(const Int8Operands& operands, const Int8Size& sizes) : of(operands), size(sizes) {
        const int across = (size.columns + COLUMNS - 1) / COLUMNS, down = (size.rows + INT8_DOWN - 1) / INT8_DOWN;
        const int group = blockIdx.x / (INT8_GROUP * across), above = group * INT8_GROUP;
        const int height = min(INT8_GROUP, down - above), place = blockIdx.x - above * across;
        first_row = (above + place % height) * INT8_DOWN;
        first_column = place / height * COLUMNS;
        memory = launched_shared();
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int k = 0; k < 4; ++k) sums[i][j][k] = 0;
    }

    // Which chunk copy i of this thread is, in step `step` along the depth. Returns whether it is there; else it is zeros.
    __device__ __forceinline__ bool source(int i, int step, const uint4*& from) const {
        const bool of_rows = i < OF_ROWS;
        const int row = threadIdx.x / 4 + (of_rows ? i : i - OF_ROWS) * (BLOCK / 4), chunk = step * 4 + threadIdx.x % 4;
        const int at = row + (of_rows ? first_row : first_column), lanes = size.depth / 16;
        const bool there = at < (of_rows ? size.rows : size.columns) && chunk < lanes;
        from = (of_rows ? of.rows : of.weight) + (there ? (size_t)at * lanes + chunk : 0);
        return there;
    }

    __device__ __forceinline__ unsigned target(int i, int stage) const {
        return memory + stage * STAGE + chunk_at(threadIdx.x / 4 + i * (BLOCK / 4), threadIdx.x % 4);
    }

    __device__ __forceinline__ void copy(int step) const {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const uint4* from;
            const bool there = source(i, step, from);
            copy_async(target(i, step % STAGES), from, there);
        }
    }

    __device__ __forceinline__ void fetch(int step, uint4 (&held)[COPIES]) const {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const uint4* from;
            held[i] = source(i, step, from) ? *from : make_uint4(0, 0, 0, 0);
        }
    }

    __device__ __forceinline__ void store(int step, const uint4 (&held)[COPIES]) const {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) write_shared(target(i, step % STAGES), held[i]);
    }

    __device__ __forceinline__ int warp_row() const { return threadIdx.x / 32 / ACROSS * INT8_PART; }
    __device__ __forceinline__ int warp_column() const { return threadIdx.x / 32 % ACROSS * INT8_PART; }

    __device__ __forceinline__ void multiply(int step) {
        const int lane = threadIdx.x % 32;
        const unsigned stage = memory + step % STAGES * STAGE;
        const int row = warp_row() + lane % 16, column = INT8_DOWN + warp_column() + lane % 8 + lane / 16 * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned left = stage + chunk_at(row, 2 * half + lane / 16);
            const unsigned right = stage + chunk_at(column, 2 * half + lane / 8 % 2);
            unsigned a[4][4], b[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) read_matrices(a[i], left + i * 16 * INT8_DEPTH);
#pragma unroll
            for (int j = 0; j < 4; ++j) read_matrices(b[j], right + j * 16 * INT8_DEPTH);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    add_int8<AMPERE>(sums[i][2 * j], a[i], b[j][0], b[j][1]);
                    add_int8<AMPERE>(sums[i][2 * j + 1], a[i], b[j][2], b[j][3]);
                }
            }
        }
    }

    // Rows lane / 4 of each eight, of which four lanes have two neighbouring columns of each eight.
    __device__ __forceinline__ void write() const {
        const int lane = threadIdx.x % 32, four = lane % 4;
        const int begin = first_column + warp_column();
        float2 scales[8], biases[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int column = begin + 8 * j + 2 * four;
            const bool there = column < size.columns;
            scales[j] = there ? make_float2(of.weight_scales[column], of.weight_scales[column + 1]) : make_float2(0, 0);
            biases[j] = there && of.bias ? pair_of<Type>(of.bias[column / 2]) : make_float2(0, 0);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // eight rows
            const int row = first_row + warp_row() + 8 * i + lane / 4;
            const float scale = row < size.rows ? of.row_scales[row] : 0;
#pragma unroll
            for (int j = 0; j < 8; j += 4) {
                unsigned words[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int* const sum = &sums[i / 2][j + k][i % 2 * 2];
                    const float low = __fmaf_rn((float)sum[0] * scale, scales[j + k].x, biases[j + k].x);
                    words[k] = pair_in<Type>(low, __fmaf_rn((float)sum[1] * scale, scales[j + k].y, biases[j + k].y));
                }
                transpose_of_four(words);
                const int column = begin + 8 * (j + four);
                if (row < size.rows && column < size.columns)
                    of.y[((size_t)row * size.columns + column) / VECTOR] = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
};

template <class Type, int ACROSS, int STAGES>
static __device__ __forceinline__ void int8_product(const Int8Operands& of, const Int8Size& size) {
    wait_for_earlier_kernels();
    Int8Tile<Type, true, ACROSS, STAGES> tile(of, size);
    const int steps = (size.depth + INT8_DEPTH - 1) / INT8_DEPTH;
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps) tile.copy(step);
        end_group();
    }
    for (int step = 0; step < steps; ++step) {
        wait_for_groups<STAGES - 2>();
        __syncthreads();  // all of this step is there, and nobody reads the one before it
        if (step + STAGES - 1 < steps) tile.copy(step + STAGES - 1);
        end_group();
        tile.multiply(step);
    }
    tile.write();
}

extern "C" __global__ void __launch_bounds__(128) int8_product_turing_half(Int8Operands of, Int8Size size) {
    wait_for_earlier_kernels();
    using Tile = Int8Tile<Half, false, 2, 2>;
    Tile tile(of, size);
    const int steps = (size.depth + INT8_DEPTH - 1) / INT8_DEPTH;
    uint4 held[Tile::COPIES];
    tile.fetch(0, held);
    tile.store(0, held);
    __syncthreads();
    for (int step = 0; step < steps; ++step) {
        if (step + 1 < steps) tile.fetch(step + 1, held);
        tile.multiply(step);
        if (step + 1 < steps) tile.store(step + 1, held);
        __syncthreads();
    }
    tile.write();
}

#if __CUDA_ARCH__ >= 800
extern "C" __global__ void __launch_bounds__(256) int8_product_wide_half(Int8Operands of, Int8Size size) {
    int8_product<Half, 4, INT8_WIDE_STAGES>(of, size);
}

extern "C" __global__ void __launch_bounds__(256) int8_product_wide_bfloat16(Int8Operands of, Int8Size size) {
    int8_product<Bfloat16, 4, INT8_WIDE_STAGES>(of, size);
}

extern "C" __global__ void __launch_bounds__(128) int8_product_narrow_half(Int8Operands of, Int8Size size) {
    int8_product<Half, 2, INT8_NARROW_STAGES>(of, size);
}

extern "C" __global__ void __launch_bounds__(128) int8_product_narrow_bfloat16(Int8Operands of, Int8Size size) {
    int8_product<Bfloat16, 2, INT8_NARROW_STAGES>(of, size);
}
#endif
