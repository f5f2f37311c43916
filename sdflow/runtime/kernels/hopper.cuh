// Of Hopper (sm_90a alone): tiles that the copy engine (TMA) moves, barriers that count their bytes, products of warpgroups.
//
// PTX ISA: 9.7.9.27 (cp.async.bulk.tensor), 9.7.13.15 (mbarrier), 9.7.15 (wgmma). Shared memory is addressed by numbers.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define WARPGROUP 128

// CUtensorMap of cuda.h: a matrix in memory, and the box of it that is moved at once.
struct alignas(64) TensorMap {
    unsigned long long content[16];
};

// What a launch gives a block, in whole kilobytes, as the swizzle takes it.
static __device__ __forceinline__ unsigned dynamic_shared() {
    extern __shared__ __align__(1024) unsigned char memory[];
    return (unsigned)__cvta_generic_to_shared(memory);
}

// A barrier has 8 bytes. Its phase ends when `count` have arrived, and as many bytes as were announced.
static __device__ __forceinline__ void make_barrier(unsigned at, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

// By the thread that made them, before the block meets.
static __device__ __forceinline__ void barriers_are_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void arrive_and_expect(unsigned at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void arrive(unsigned at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

// For the end of the phase of this parity; that before the first one has ended.
static __device__ __forceinline__ void wait_for_phase(unsigned at, int parity) {
    int ended;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                     : "=r"(ended) : "r"(at), "r"(parity) : "memory");
    } while (!ended);
}

// The box at column x and row y; zeros where the matrix has ended.
static __device__ __forceinline__ void load_tile(unsigned to, const TensorMap* map, int x, int y, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}

static __device__ __forceinline__ void prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// What falls outside the matrix is left out.
static __device__ __forceinline__ void store_tile(const TensorMap* map, int x, int y, unsigned from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(map), "r"(x), "r"(y), "r"(from) : "memory");
}

// What a thread has stored so far, read from shared memory, or written as well.
static __device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
static __device__ __forceinline__ void wait_for_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
static __device__ __forceinline__ void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// By each thread that wrote to shared memory what is stored from there, before they meet.
static __device__ __forceinline__ void show_to_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

static __device__ __forceinline__ void copy_word(unsigned to, const unsigned* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

static __device__ __forceinline__ void wait_for_words() { asm volatile("cp.async.wait_all;" ::: "memory"); }

static __device__ __forceinline__ unsigned word_at(unsigned at) {
    unsigned value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
    return value;
}

// Four matrices of 8x8 halves, as the threads of a warp have them of a product; thread 8 i + j gives where row j of i goes.
static __device__ __forceinline__ void store_matrices(unsigned at, const unsigned (&pairs)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3]) : "memory");
}

// Some threads of a block, at one of the barriers 1 to 15; those who signal do not wait.
static __device__ __forceinline__ void meet(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

static __device__ __forceinline__ void signal(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Of a thread, from here on. All warps of a warpgroup.
template <int COUNT>
static __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
static __device__ __forceinline__ void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

static __device__ __forceinline__ float reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// A matrix in shared memory in rows of 128 swizzled bytes: `stride` bytes from eight rows to the next, `leading` from the 64
// columns of a row to the next ones, where these are what is not summed over. CUTLASS: make_gmma_desc.
static __device__ __forceinline__ unsigned long long matrix(unsigned at, int leading, int stride) {
    return (unsigned long long)(at >> 4 & 0x3fff) | (unsigned long long)(leading >> 4) << 16 |
           (unsigned long long)(stride >> 4) << 32 | 1ull << 62;
}

// Products that a warpgroup has under way. Nobody touches their sums before they are waited for.
static __device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>  // may go on, of those that were committed
static __device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// d = a b, or d += a b if `add`: a has 64 rows of 16, b 16 rows of twice as many columns as a thread has sums. Of each eight columns
// i it has two neighbours in two rows: d[4 i], d[4 i + 1] in row lane / 4 of its warp's 16, the other two eight rows below.
#define SUMS(i)                                                                                                  \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]),                  \
    "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7]),                  \
    "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]), "+f"(d[i + 11]),                  \
    "+f"(d[i + 12]), "+f"(d[i + 13]), "+f"(d[i + 14]), "+f"(d[i + 15])

static __device__ __forceinline__ void multiply(float (&d)[128], unsigned long long a, unsigned long long b, int add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
        "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
        "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "
        "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "
        "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, "
        "%124, %125, %126, %127}, %128, %129, p, 1, 1, 0, 1;}"
        : SUMS(0), SUMS(16), SUMS(32), SUMS(48), SUMS(64), SUMS(80), SUMS(96), SUMS(112)
        : "l"(a), "l"(b), "r"(add));
}

static __device__ __forceinline__ void multiply(float (&d)[64], unsigned long long a, unsigned long long b, int add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
        "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 1;}"
        : SUMS(0), SUMS(16), SUMS(32), SUMS(48)
        : "l"(a), "l"(b), "r"(add));
}

// The same of E4M3: a has 64 rows of 32, b as many columns, which lie as rows of 32 in memory, as a's do. 160 columns.
static __device__ __forceinline__ void multiply_eights(float (&d)[80], unsigned long long a, unsigned long long b, int add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %82, 0; wgmma.mma_async.sync.aligned.m64n160k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
        "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
        "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}, %80, %81, p, 1, 1;}"
        : SUMS(0), SUMS(16), SUMS(32), SUMS(48), SUMS(64)
        : "l"(a), "l"(b), "r"(add));
}

#undef SUMS
#endif
