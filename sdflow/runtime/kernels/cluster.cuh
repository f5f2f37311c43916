// Blocks of a cluster: waiting for each other, and reading each other's shared memory.

#if __CUDA_ARCH__ >= 900

// All threads of the cluster's blocks arrive, and see then what the others wrote before.
static __device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
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
