/* Memsets of a CUDA graph as kernels.
 *
 * A memset between two kernels costs 5 us of a replay, a kernel that does the same 2: the GPU leaves the path that it starts
 * kernels on (benchmarks/RESULTS.md). cuDNN's attention and some of cuBLAS's products clear a few bytes before each launch, so
 * that a step of Stable Diffusion XL has 218 of them.
 * https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GRAPH.html
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "ort.h"

enum { KERNEL_NODE = 0, MEMCPY_NODE = 1, MEMSET_NODE = 2, EMPTY_NODE = 5 };
#define MOST_NEIGHBOURS 64
#define MOST_BYTES ((size_t)16 << 20)

typedef struct {
    uint64_t to;
    size_t pitch;
    unsigned value, element;
    size_t width, height;
} Memset; /* CUDA_MEMSET_NODE_PARAMS */

typedef struct {
    void *function;
    unsigned grid[3], block[3], shared;
    void **arguments, **extra, *kernel, *context;
} KernelNode; /* CUDA_KERNEL_NODE_PARAMS_v2 */

typedef struct {
    unsigned char from_port, to_port, type, reserved[5];
} Edge; /* CUgraphEdgeData */

typedef struct {
    int (*nodes)(void *, void **, size_t *);
    int (*type)(void *, int *);
    int (*memset_of)(void *, Memset *);
    int (*before)(void *, void **, Edge *, size_t *);
    int (*after)(void *, void **, Edge *, size_t *);
    int (*add_kernel)(void **, void *, void *const *, size_t, const KernelNode *);
    int (*connect)(void *, void *const *, void *const *, const Edge *, size_t);
    int (*destroy)(void *);
} Driver;

static const char *load_driver(Driver *driver) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return "libcuda.so.1 cannot be loaded";
    driver->nodes = dlsym(library, "cuGraphGetNodes");
    driver->type = dlsym(library, "cuGraphNodeGetType");
    driver->memset_of = dlsym(library, "cuGraphMemsetNodeGetParams");
    driver->before = dlsym(library, "cuGraphNodeGetDependencies_v2");
    driver->after = dlsym(library, "cuGraphNodeGetDependentNodes_v2");
    driver->add_kernel = dlsym(library, "cuGraphAddKernelNode_v2");
    driver->connect = dlsym(library, "cuGraphAddDependencies_v2");
    driver->destroy = dlsym(library, "cuGraphDestroyNode");
    return driver->nodes && driver->type && driver->memset_of && driver->before && driver->after && driver->add_kernel &&
                   driver->connect && driver->destroy
               ? 0
               : "the driver is too old to change graphs: it takes one of CUDA 12.3 or newer";
}

/* The four bytes that a memset repeats. */
static unsigned pattern_of(const Memset *set) {
    return set->element == 1   ? (set->value & 0xff) * 0x01010101u
           : set->element == 2 ? (set->value & 0xffff) * 0x00010001u
                               : set->value;
}

static int as_kernel(const Driver *driver, void *graph, void *node, const Memset *set) {
    void *before[MOST_NEIGHBOURS], *after[MOST_NEIGHBOURS], *same[MOST_NEIGHBOURS], *kernel;
    Edge into[MOST_NEIGHBOURS], out_of[MOST_NEIGHBOURS];
    size_t earlier = MOST_NEIGHBOURS, later = MOST_NEIGHBOURS;
    int failed = driver->before(node, before, into, &earlier);
    if (!failed) failed = driver->after(node, after, out_of, &later);
    if (failed) return failed;
    uint64_t to = set->to, bytes = (uint64_t)set->width * set->element;
    unsigned pattern = pattern_of(set);
    void *arguments[] = {&to, &pattern, &bytes};
    const unsigned blocks = (unsigned)((bytes + 4 * FILL_THREADS - 1) / (4 * FILL_THREADS));
    const KernelNode made = {gpu.fill, {blocks, 1, 1}, {FILL_THREADS, 1, 1}, 0, arguments, 0, 0, 0};
    failed = driver->add_kernel(&kernel, graph, 0, 0, &made);
    for (size_t i = 0; i < MOST_NEIGHBOURS; ++i) same[i] = kernel;
    if (!failed && earlier) failed = driver->connect(graph, before, same, into, earlier);
    if (!failed && later) failed = driver->connect(graph, same, after, out_of, later);
    return failed ? failed : driver->destroy(node);
}

/* Replaces each memset of up to 16 MB in a graph (CUgraph) that is not instantiated yet. counts: how many were replaced, and how
 * many nodes there are besides kernels, copies and memsets. Returns null, or why not; the graph is then to be
 * thrown away. */
__attribute__((visibility("default"))) const char *sdflow_memsets_as_kernels(void *graph, size_t counts[2]) {
    static __thread char refusal[96];
    Driver driver;
    size_t count = 0;
    counts[0] = counts[1] = 0;
    const char *why = load_kernels();
    if (!why) why = load_driver(&driver);
    if (why) return why;
    int failed = driver.nodes(graph, 0, &count);
    void **nodes = calloc(count + 1, sizeof *nodes);
    if (!nodes) return "out of memory";
    if (!failed) failed = driver.nodes(graph, nodes, &count);
    for (size_t i = 0; !failed && i < count; ++i) {
        int type;
        Memset set;
        failed = driver.type(nodes[i], &type);
        if (failed || type == KERNEL_NODE || type == MEMCPY_NODE || type == EMPTY_NODE) continue;
        if (type != MEMSET_NODE) ++counts[1];
        else if (!(failed = driver.memset_of(nodes[i], &set)) && set.height == 1 && set.width * set.element <= MOST_BYTES) {
            failed = as_kernel(&driver, graph, nodes[i], &set);
            counts[0] += !failed;
        }
    }
    free(nodes);
    if (!failed) return 0;
    snprintf(refusal, sizeof refusal, "the driver does not change the graph: %s", name_of(failed));
    return refusal;
}
