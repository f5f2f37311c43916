// Attention in which all queries of a head read the same few keys: a block has them and their values in shared memory, and
// its warps take tiles of queries. A tile's scores are held in registers, of a piece of the keys; where there are more, the
// softmax goes on from piece to piece. Products by tensor cores, all else in float32.

#define MINUS_INFINITY __int_as_float(0xff800000)

// Places in vectors of eight channels. `queries`, `keys`: of an image.
struct Attention {
    int queries, keys;
    int row, head;          // from one query to the next one, to the next head's
    int key_row, key_head;  // of keys, and of values
    int rounds;             // tiles for a warp
    int held;               // keys in shared memory: whole pieces, all of them or one
    float scale;            // of scores, as exponents of 2
};


// A head in shared memory: rows filled up with zeros to a multiple of 16 channels, as products take them, and an odd number of
// vectors apart, so that eight rows lie in different banks. PITCH: bytes from one to the next.
template <int VECTORS>
struct Head {
    static constexpr int STEPS = (VECTORS + 1) / 2, WIDTH = 2 * STEPS, PITCH = (WIDTH + 1) * (int)sizeof(uint4);
};

// ROWS rows into shared memory, zeros for those that are not `there`, by THREADS_HERE threads: as many whole rows at once as they
// are enough for, so that a thread goes straight down.
template <int VECTORS, int ROWS, int THREADS_HERE>
static __device__ __forceinline__ void copy_rows(unsigned to, const uint4* from, int stride, int there, int thread) {
    constexpr int WIDTH = Head<VECTORS>::WIDTH, AT_ONCE = THREADS_HERE / WIDTH;
    const int first = (unsigned)thread / WIDTH, lane = (unsigned)thread % WIDTH;
    if (first >= AT_ONCE) return;
    to += first * Head<VECTORS>::PITCH + lane * (int)sizeof(uint4);
    from += (size_t)first * stride + lane;
    if (lane >= VECTORS) there = 0;
#pragma unroll
    for (int i = 0; i < ROWS; i += AT_ONCE) {
        if (ROWS % AT_ONCE && first + i >= ROWS) break;
        copy_async(to, from, first + i < there);
        to += AT_ONCE * Head<VECTORS>::PITCH;
        from += (size_t)AT_ONCE * stride;
    }
}

// TILES tiles of 16 queries, and PAIRS pairs of eight keys: a lane has of each eight keys two, of queries lane / 4 and 8 more.
template <int VECTORS, int TILES, int PAIRS>
static __device__ __forceinline__ void score(float (&scores)[TILES][2 * PAIRS][4], unsigned queries,
                                             unsigned keys) {
    constexpr int PITCH = Head<VECTORS>::PITCH;
    const int lane = threadIdx.x;
    queries += lane % 16 * PITCH + lane / 16 * (int)sizeof(uint4);
    keys += (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * (int)sizeof(uint4);
#pragma unroll
    for (int step = 0; step < Head<VECTORS>::STEPS; ++step) {
        unsigned a[TILES][4], b[4];
#pragma unroll
        for (int t = 0; t < TILES; ++t) read_matrices(a[t], queries + t * 16 * PITCH + 2 * step * (int)sizeof(uint4));
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            read_matrices(b, keys + pair * 16 * PITCH + 2 * step * (int)sizeof(uint4));
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                add_product(scores[t][2 * pair], a[t], b[0], b[1]);
                add_product(scores[t][2 * pair + 1], a[t], b[2], b[3]);
            }
        }
    }
}

// Scores of keys that are not there, when there are `left`.
template <int TILES, int PAIRS>
static __device__ __forceinline__ void forget(float (&scores)[TILES][2 * PAIRS][4], int left) {
#pragma unroll
    for (int j = 0; j < 2 * PAIRS; ++j) {
        if (8 * j + 8 <= left) continue;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (8 * j + 2 * (int)(threadIdx.x % 4) + i % 2 >= left) scores[t][j][i] = MINUS_INFINITY;
            }
        }
    }
}

// What is known of a softmax: the largest score, this lane's share of the sum of the others beside it, and the values by them.
template <int VECTORS, int TILES>
struct Softmax {
    float largest[TILES][2], total[TILES][2], sums[TILES][VECTORS][4];
};

template <int VECTORS, int TILES>
static __device__ __forceinline__ void begin(Softmax<VECTORS, TILES>& softmax) {
    softmax = {};
#pragma unroll
    for (int t = 0; t < TILES; ++t) softmax.largest[t][0] = softmax.largest[t][1] = MINUS_INFINITY;
}

// The largest score so far; what is known is made to fit it. shift: what scores are to be lowered by.
template <bool MANY, int VECTORS, int TILES, int PAIRS>
static __device__ __forceinline__ void find_largest(float (&shift)[TILES][2], Softmax<VECTORS, TILES>& softmax,
                                                    const float (&scores)[TILES][2 * PAIRS][4], float scale) {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = softmax.largest[t][half];
#pragma unroll
            for (int j = 0; j < 2 * PAIRS; ++j) {
                largest = fmaxf(largest, fmaxf(scores[t][j][2 * half], scores[t][j][2 * half + 1]));
            }
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            shift[t][half] = largest * scale;
            if (MANY) {
                const float before = power_of_two(softmax.largest[t][half] * scale - shift[t][half]);
                softmax.total[t][half] *= before;
#pragma unroll
                for (int j = 0; j < VECTORS; ++j) {
                    softmax.sums[t][j][2 * half] *= before;
                    softmax.sums[t][j][2 * half + 1] *= before;
                }
            }
            softmax.largest[t][half] = largest;
        }
    }
}

// Scores of a pair become weights, as the next product takes them.
template <int VECTORS, int TILES, int PAIRS>
static __device__ __forceinline__ void weigh(unsigned (&weights)[TILES][4], Softmax<VECTORS, TILES>& softmax,
                                             const float (&scores)[TILES][2 * PAIRS][4], int pair, float scale,
                                             const float (&shift)[TILES][2]) {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // of a: top left, bottom left, top right, bottom right
            const int half = i % 2;
            const float* two = &scores[t][2 * pair + i / 2][2 * half];
            const float first = power_of_two(two[0] * scale - shift[t][half]);
            const float second = power_of_two(two[1] * scale - shift[t][half]);
            softmax.total[t][half] += first + second;
            weights[t][i] = packed(first, second);
        }
    }
}

template <int VECTORS, int TILES>
static __device__ __forceinline__ void add_values(Softmax<VECTORS, TILES>& softmax, const unsigned (&weights)[TILES][4],
                                                  unsigned values) {
    values += threadIdx.x % 16 * Head<VECTORS>::PITCH + threadIdx.x / 16 * (int)sizeof(uint4);
#pragma unroll
    for (int j = 0; j < VECTORS; j += 2) {
        unsigned b[4];
        read_transposed(b, values + j * (int)sizeof(uint4));
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            add_product(softmax.sums[t][j], weights[t], b[0], b[1]);
            if (j + 1 < VECTORS) add_product(softmax.sums[t][j + 1], weights[t], b[2], b[3]);
        }
    }
}

// The result, through a warp's own shared memory, so that whole vectors are written: `there` rows.
template <int VECTORS, int TILES>
static __device__ __forceinline__ void write(uint4* y, int stride, int there, const Softmax<VECTORS, TILES>& softmax,
                                             unsigned own) {
    constexpr int PITCH = Head<VECTORS>::PITCH;
    const int lane = threadIdx.x;
    const unsigned pairs = own + lane / 4 * PITCH + lane % 4 * 4;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = softmax.total[t][half];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const float scale = __fdividef(1.0f, total);
#pragma unroll
            for (int j = 0; j < VECTORS; ++j) {
                const float* sums = softmax.sums[t][j];
                write_shared(pairs + (t * 16 + half * 8) * PITCH + j * (int)sizeof(uint4),
                             packed(sums[2 * half] * scale, sums[2 * half + 1] * scale));
            }
        }
    }
    __syncwarp();
    constexpr int AT_ONCE = 32 / VECTORS;
    const int first = (unsigned)lane / VECTORS, vector = (unsigned)lane % VECTORS;
    if (first >= AT_ONCE) return;
    own += first * PITCH + vector * (int)sizeof(uint4);
    y += (size_t)first * stride + vector;
#pragma unroll
    for (int row = 0; row < 16 * TILES; row += AT_ONCE) {
        if ((16 * TILES) % AT_ONCE && first + row >= 16 * TILES) break;
        if (first + row < there) *y = read_shared(own);
        own += AT_ONCE * PITCH;
        y += (size_t)AT_ONCE * stride;
    }
}

// Grid (blocks, heads, images), block (32, WARPS). q, k, v: see Attention; y: (images, queries, heads, VECTORS). MANY: there
// may be several pieces. BUFFERS: 2, the queries of a warp's next tiles are read before they are wanted.
// Shared memory: `held` keys, as many values, and for each warp BUFFERS * TILES * 16 queries.
template <int VECTORS, int WARPS, int TILES, int PAIRS, bool MANY, int BUFFERS>
static __device__ __forceinline__ void attend(const uint4* q, const uint4* k, const uint4* v, uint4* y, const Attention& all) {
    constexpr int PITCH = Head<VECTORS>::PITCH, ROWS = 16 * TILES, PIECE = 16 * PAIRS, STEP = WARPS * ROWS;
    wait_for_earlier_kernels();
    const int lane = threadIdx.x, warp = threadIdx.y, thread = warp * 32 + lane, image = blockIdx.z, head = blockIdx.y;
    const unsigned keys = launched_shared();
    const unsigned values = keys + all.held * PITCH;
    unsigned own = values + all.held * PITCH + warp * BUFFERS * ROWS * PITCH;
    unsigned next = BUFFERS > 1 ? own + ROWS * PITCH : own;
    int first = blockIdx.x * all.rounds * STEP + warp * ROWS, left = all.queries - first;
    q += ((size_t)image * all.queries + first) * all.row + (size_t)head * all.head;
    k += (size_t)image * all.keys * all.key_row + (size_t)head * all.key_head;
    v += (size_t)image * all.keys * all.key_row + (size_t)head * all.key_head;
    const int stride = gridDim.y * VECTORS;
    y += ((size_t)image * all.queries + first) * stride + head * VECTORS;
    const bool resident = !MANY || all.keys <= all.held;

    const auto copy_pieces = [&](unsigned to, const uint4* from) {
        for (int start = 0; start < (MANY ? all.held : 1); start += PIECE) {
            copy_rows<VECTORS, PIECE, 32 * WARPS>(to + start * PITCH, from + (size_t)start * all.key_row, all.key_row,
                                                  all.keys - start, thread);
        }
    };
    copy_rows<VECTORS, ROWS, 32>(own, q, all.row, left, lane);
    if (resident) {
        copy_pieces(keys, k);
        end_group();
        copy_pieces(values, v);
    }
    end_group();
    for (int round = 0; round < all.rounds; ++round) {
        if (BUFFERS > 1) {
            if (round + 1 < all.rounds) copy_rows<VECTORS, ROWS, 32>(next, q + (size_t)STEP * all.row, all.row, left - STEP, lane);
            end_group();
        }
        if (round) {
            wait_for_groups<BUFFERS - 1>();
            __syncwarp();
        }
        Softmax<VECTORS, TILES> softmax;
        if (MANY) begin(softmax);
        for (int start = 0; start < (MANY ? all.keys : 1); start += PIECE) {
            const int at = resident ? start * PITCH : 0;
            if (!resident) {
                __syncthreads();  // the piece before was read
                const int there = all.keys - start;
                copy_rows<VECTORS, PIECE, 32 * WARPS>(keys, k + (size_t)start * all.key_row, all.key_row, there, thread);
                end_group();
                copy_rows<VECTORS, PIECE, 32 * WARPS>(values, v + (size_t)start * all.key_row, all.key_row, there, thread);
                end_group();
                wait_for_groups<1>();
                __syncthreads();
            } else if (round == 0 && start == 0) {
                wait_for_groups<BUFFERS>();
                __syncthreads();
            }
            float scores[TILES][2 * PAIRS][4] = {};
            score<VECTORS, TILES, PAIRS>(scores, own, keys + at);
            if (all.keys - start < PIECE) forget<TILES, PAIRS>(scores, all.keys - start);
            float shift[TILES][2];
            if (!MANY) begin(softmax);
            find_largest<MANY, VECTORS, TILES, PAIRS>(shift, softmax, scores, all.scale);
            if (!resident) {
                wait_for_groups<0>();
                __syncthreads();
            } else if (round == 0 && start == 0) {
                wait_for_groups<BUFFERS - 1>();
                __syncthreads();
            }
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                unsigned weights[TILES][4];
                weigh<VECTORS, TILES, PAIRS>(weights, softmax, scores, pair, all.scale, shift);
                add_values<VECTORS, TILES>(softmax, weights, values + at + pair * 16 * PITCH);
            }
        }
        __syncwarp();  // the queries were read
        write<VECTORS, TILES>(y, stride, left, softmax, own);
        if (round + 1 == all.rounds) break;
        __syncwarp();
        left -= STEP;
        q += (size_t)STEP * all.row;
        y += (size_t)STEP * stride;
        if (BUFFERS > 1) {
            const unsigned written = own;
            own = next;
            next = written;
        } else {
            copy_rows<VECTORS, ROWS, 32>(own, q, all.row, left, lane);
            end_group();
        }
    }
}

#define FEW_KEYS_one false
#define FEW_KEYS_more true
#define FEW_KEYS_KERNEL(SIZE, PIECE, PIECES, WARPS, TILES, BUFFERS, BLOCKS)                                          \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) few_keys_attention_##SIZE##_##PIECE##_##PIECES( \
        const uint4* __restrict__ q, const uint4* __restrict__ k, const uint4* __restrict__ v, uint4* __restrict__ y, \
        const Attention all) {                                                                                       \
        attend<SIZE / VECTOR, WARPS, TILES, PIECE / 16, FEW_KEYS_##PIECES, BUFFERS>(q, k, v, y, all);                \
    }
FEW_KEYS_KERNELS(FEW_KEYS_KERNEL)
