// Blocks of a cluster: waiting for each other, and reading each other's shared memory.

#if __CUDA_ARCH__ >= 900

// All threads of the cluster's blocks arrive, and see then what the others wrote before.
static __device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The two halves, for shared memory that must stay while others read it: a thread arrives when it has used what it read of the
// others, and its block ends when all have arrived. Nothing that was written is handed over, so that no thread waits here until
// its writes to the device's memory are done, as it does where an arrival releases.
static __device__ __forceinline__ void arrive_in_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wait_for_arrivals() {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// What a block of the cluster has where this one has `shared`.
static __device__ __forceinline__ float2 of_block(const float2* shared, int rank) {
    unsigned address = (unsigned)__cvta_generic_to_shared(shared);
    float2 value;
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
    return value;
}

#endif
