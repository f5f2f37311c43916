// Matrix products of a warp in int8, summed in int32, and what they need beside mma.cuh.

// 16 bytes into shared memory.
static __device__ __forceinline__ void write_shared(unsigned to, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "r"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}

// sum (16, 8) += a (16, 32) b (32, 8). A lane has of `sum` rows lane / 4 and 8 more, columns 2 (lane % 4) and the next one; of a
// four neighbouring bytes of each quarter, (top, left), (bottom, left), (top, right), (bottom, right), in row lane / 4 from column
// 4 (lane % 4) on; of b, whose halves are b0 above b1, the same of column lane / 4. AMPERE: by one instruction of compute
// capability 8.0, else by four of 7.5.
template <bool AMPERE>
static __device__ __forceinline__ void add_int8(int (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if constexpr (AMPERE) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // top, bottom; left, right
            asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                : "+r"(sum[i % 2 * 2]), "+r"(sum[i % 2 * 2 + 1]) : "r"(a[i]), "r"(i < 2 ? b0 : b1));
        }
    }
}
