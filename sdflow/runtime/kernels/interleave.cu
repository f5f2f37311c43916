// Puts four images between one another: y[2 i + a][2 j + b] = x[i + a][j + b], phase 2 a + b of it.

// Grid (blocks of columns * lanes, rows, images), a thread for a pixel of the small image and 16 bytes of its channels.
// x: (images, rows + 1, columns + 1, 4, lanes), y: (images, 2 rows, 2 columns, lanes).
extern "C" __global__ void __launch_bounds__(INTERLEAVE_THREADS)
interleave(const uint4* __restrict__ x, uint4* __restrict__ y, int columns, int lanes) {
    wait_for_earlier_kernels();
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= columns * lanes) return;
    const int column = at / lanes, lane = at % lanes, rows = gridDim.y, row = blockIdx.y, image = blockIdx.z;
    const size_t pixel = (size_t)4 * lanes, down = (columns + 1) * pixel, below = (size_t)2 * columns * lanes;
    const uint4* from = x + ((size_t)image * (rows + 1) + row) * down + column * pixel + lane;
    uint4* to = y + ((size_t)image * rows + row) * 2 * below + (size_t)2 * column * lanes + lane;
    const uint4 a = from[0], b = from[pixel + lanes], c = from[down + 2 * lanes], d = from[down + pixel + 3 * lanes];
    to[0] = a;
    to[lanes] = b;
    to[below] = c;
    to[below + lanes] = d;
}
