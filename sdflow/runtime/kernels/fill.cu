// What a memset of a CUDA graph does, as a kernel (memset_nodes.c).

// Grid (blocks), block (FILL_THREADS). pattern: the four bytes that are repeated.
extern "C" __global__ void __launch_bounds__(FILL_THREADS) fill(unsigned char* to, unsigned pattern, unsigned long long bytes) {
    wait_for_earlier_kernels();
    const unsigned long long from = (blockIdx.x * (unsigned long long)FILL_THREADS + threadIdx.x) * 4;
    if (from + 4 <= bytes && (size_t)to % 4 == 0) {
        *(unsigned*)(to + from) = pattern;
        return;
    }
    for (unsigned long long i = from; i < bytes && i < from + 4; ++i) to[i] = (unsigned char)(pattern >> 8 * (i % 4));
}
