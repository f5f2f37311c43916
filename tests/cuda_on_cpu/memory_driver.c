/* The driver's calls for virtual memory on the CPU: handles are files without a name, mapped to reserved addresses. */
#define _GNU_SOURCE
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define RESERVED (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

static int64_t handles, least_free = INT64_MAX;

int64_t held_handles(void) { return handles; }
void leave_handles(int64_t count) { least_free = handles + count; }

int cuMemGetAllocationGranularity(size_t *found, const void *properties, int flag) {
    return (void)properties, (void)flag, *found = 1 << 21, 0;
}
int cuMemAddressReserve(uint64_t *at, size_t size, size_t alignment, uint64_t wanted, uint64_t flags) {
    (void)alignment, (void)wanted, (void)flags;
    void *found = mmap(0, size, PROT_NONE, RESERVED, -1, 0);
    *at = (uint64_t)(uintptr_t)found;
    return found == MAP_FAILED;
}
int cuMemAddressFree(uint64_t at, size_t size) { return munmap((void *)(uintptr_t)at, size) != 0; }
int cuMemCreate(uint64_t *handle, size_t size, const void *properties, uint64_t flags) {
    (void)properties, (void)flags;
    if (handles >= least_free) return 2; /* CUDA_ERROR_OUT_OF_MEMORY */
    const int file = memfd_create("device", 0);
    if (file < 0 || ftruncate(file, (off_t)size)) return 1;
    *handle = (uint64_t)file;
    ++handles;
    return 0;
}
int cuMemRelease(uint64_t handle) { return --handles, close((int)handle); }
int cuMemMap(uint64_t at, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    (void)flags;
    return mmap((void *)(uintptr_t)at, size, PROT_NONE, MAP_FIXED | MAP_SHARED, (int)handle, (off_t)offset) == MAP_FAILED;
}
int cuMemUnmap(uint64_t at, size_t size) {
    return mmap((void *)(uintptr_t)at, size, PROT_NONE, MAP_FIXED | RESERVED, -1, 0) == MAP_FAILED;
}
int cuMemSetAccess(uint64_t at, size_t size, const void *access, size_t count) {
    (void)access, (void)count;
    return mprotect((void *)(uintptr_t)at, size, PROT_READ | PROT_WRITE) != 0;
}
