// y = a * gelu(b) for x + bias = (a, b), float16, computed in float32, with the GELU that has erf.

// gelu(b) = b * (erf(b / sqrt(2)) + 1) / 2. CUDA's erff takes most of such a kernel's instructions. This is Abramowitz and
// Stegun's 7.1.26, off by 1.5e-7 at most, of erfc, so that nothing is lost where b is far below zero.
static __device__ __forceinline__ float gelu(float b) {
    const float x = fabsf(b) * 0.70710678118f, t = __fdividef(1.0f, 1.0f + 0.3275911f * x);
    const float series = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const float tail = 0.5f * series * __expf(-x * x);
    return b * (b < 0 ? tail : 1.0f - tail);
}

// Grid (columns, blocks), block (wide, deep). x: (rows, 2 lanes), bias: (2 lanes), y: (rows, lanes), eight channels each.
extern "C" __global__ void __launch_bounds__(GELU_THREADS)
bias_split_gelu(const uint4* __restrict__ x, const uint4* __restrict__ bias, uint4* __restrict__ y, int rows, int lanes) {
    wait_for_earlier_kernels();
    const int lane = blockIdx.x * blockDim.x + threadIdx.x;
    if (lane >= lanes) return;
    const Floats plain_bias = floats(bias[lane]), gate_bias = floats(bias[lanes + lane]);
    const int step = gridDim.y * blockDim.y;
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    uint4 plain = x[(size_t)row * 2 * lanes + lane], gate = x[((size_t)row * 2 + 1) * lanes + lane];
    while (true) {
        const int next = row + step;
        uint4 next_plain, next_gate;
        if (next < rows) {  // on its way while this one is computed
            next_plain = x[(size_t)next * 2 * lanes + lane];
            next_gate = x[((size_t)next * 2 + 1) * lanes + lane];
        }
        const Floats a = floats(plain), b = floats(gate);
        Floats result;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            result.at[j] = (a.at[j] + plain_bias.at[j]) * gelu(b.at[j] + gate_bias.at[j]);
        }
        y[(size_t)row * lanes + lane] = halves(result);
        if (next >= rows) return;
        row = next;
        plain = next_plain;
        gate = next_gate;
    }
}
