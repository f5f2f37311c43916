// Matrix products of a warp by tensor cores, and what feeds them: copies into shared memory that go on while other things are
// done, and matrices of eight by eight float16 read from there.

// Shared memory is named by its addresses there, in bytes: numbers of 32 bits to which instructions add what is constant. A
// pointer takes twice the registers, and an addition each time.

// What the launch asks for.
static __device__ __forceinline__ unsigned launched_shared() {
    extern __shared__ uint4 launched[];
    return (unsigned)__cvta_generic_to_shared(launched);
}

static __device__ __forceinline__ void write_shared(unsigned to, unsigned value) {
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(to), "r"(value) : "memory");
}

static __device__ __forceinline__ uint4 read_shared(unsigned from) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(from) : "memory");
    return value;
}

// 16 bytes into shared memory, zeros where they are not `there`. They lie there once their thread has waited for them.
static __device__ __forceinline__ void copy_async(unsigned to, const uint4* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// What this thread has copied since the last time is a group, also when it is nothing.
static __device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// For all of this thread's groups but the `left` last ones.
template <int left>
static __device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" :: "n"(left) : "memory");
}

// Four matrices. Lanes 0 to 7 name the eight rows of the first one, 16 bytes each, lanes 8 to 15 those of the second one, and so
// on. A lane gets of each matrix row lane / 4, columns 2 (lane % 4) and the next one.
static __device__ __forceinline__ void read_matrices(unsigned (&to)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}

// The same matrices transposed: a lane gets rows 2 (lane % 4) and the next one of column lane / 4.
static __device__ __forceinline__ void read_transposed(unsigned (&to)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}

// sum (16, 8) += a (16, 16) b (16, 8), a and b in float16. A lane has of `sum` rows lane / 4 and 8 more, columns 2 (lane % 4) and
// the next one; of a the same places of its quarters, (top, left), (bottom, left), (top, right), (bottom, right); of b, whose halves
// are b0 above b1, rows 2 (lane % 4) and the next one of column lane / 4.
static __device__ __forceinline__ void add_product(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ float power_of_two(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
