// y = a * gelu(b) for x + bias = (a, b), float16, computed in float32, with the GELU that has erf.

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
