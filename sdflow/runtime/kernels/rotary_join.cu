// Columns of one matrix, then those of a gated product, silu(a) b or a silu(b), side by side: what a product reads that sums up both.

// As in rotary_join.c. Sizes are in vectors of eight channels.
struct RotaryJoin {
    const uint4 *front, *gated;  // gated: at the first of a's columns
    uint4* to;
    int rows, before, width;     // before: columns of front; width: of a, and of b
    int pitch;                   // of the rows that a and b are in, b behind a
    int second;                  // whether it is b that the sigmoid is of
};

// Grid (parts of a row, blocks that go down the rows, 1).
template <class Type>
static __device__ __forceinline__ void rotary_join(const RotaryJoin& all) {
    wait_for_earlier_kernels();
    const int lane = (int)(blockIdx.x * blockDim.x + threadIdx.x), lanes = all.before + all.width;
    if (lane >= lanes) return;
    if (lane < all.before) {
        for (int row = (int)blockIdx.y; row < all.rows; row += (int)gridDim.y) {
            all.to[(size_t)row * lanes + lane] = all.front[(size_t)row * all.before + lane];
        }
        return;
    }
    for (int row = (int)blockIdx.y; row < all.rows; row += (int)gridDim.y) {
        const uint4* from = all.gated + (size_t)row * all.pitch + (lane - all.before);
        const uint4 first = from[0], last = from[all.width];
        const Floats gates = rotary_floats<Type>(all.second ? last : first);
        Floats values = rotary_floats<Type>(all.second ? first : last);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {  // __expf overflows to infinity: a gate far below zero gives zero
            values.at[j] *= __fdividef(gates.at[j], 1.0f + __expf(-gates.at[j]));
        }
        all.to[(size_t)row * lanes + lane] = rotary_vector<Type>(values);
    }
}

extern "C" __global__ void __launch_bounds__(ROTARY_JOIN_THREADS) rotary_join_float16(const __grid_constant__ RotaryJoin all) {
    rotary_join<RotaryFloat16>(all);
}

extern "C" __global__ void __launch_bounds__(ROTARY_JOIN_THREADS) rotary_join_bfloat16(const __grid_constant__ RotaryJoin all) {
    rotary_join<RotaryBfloat16>(all);
}
