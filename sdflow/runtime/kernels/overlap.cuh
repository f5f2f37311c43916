// A kernel that is launched while the one before it in the stream still runs (programmatic dependent launch): its blocks are
// in place when that one ends, which saves the launch's latency.
// https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization

// What every thread of a kernel does before it reads or writes the device's memory: until here nothing of what earlier kernels wrote
// is there, and what they read must stay.
static __device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
