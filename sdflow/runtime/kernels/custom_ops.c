/* The kernels of this folder as an operator of ONNX Runtime's CUDA provider: sdflow.GroupNorm.
 *
 * inputs: x (N, H, W, C) float16; gamma (C), beta (C) float32; optional skip, as x or (N, C) or (N, 1, 1, C), and bias
 * (C), float16. outputs: y as x; scratch for the sums; optional x + skip + bias. attributes: groups, epsilon, activation
 * (1: SiLU).
 *
 * ONNX Runtime's headers come with no Python package. Its C interface is a table of functions to which later versions
 * only append, so that the few in use are named here by their place in it (onnxruntime_c_api.h, OrtApi); so is the
 * interface of an operator up to version 16 of that interface (OrtCustomOp).
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define ORT_VERSION 16
#define VECTOR 8
#define MAX_GROUPS 32

enum { FLOAT = 1, FLOAT16 = 10 };
enum { REQUIRED = 0, OPTIONAL = 1 };

typedef const void *const *Api;
typedef void Status;

#define CALL(api, place, result, ...) ((result (*)(__VA_ARGS__))(api)[place])
#define CREATE_STATUS(api) CALL(api, 0, Status *, int, const char *)
#define CREATE_DOMAIN(api) CALL(api, 26, Status *, const char *, void **)
#define DOMAIN_ADD(api) CALL(api, 27, Status *, void *, const void *)
#define ADD_DOMAIN(api) CALL(api, 28, Status *, void *, void *)
#define TENSOR_DATA(api) CALL(api, 51, Status *, const void *, void **)
#define DIMENSIONS_COUNT(api) CALL(api, 61, Status *, const void *, size_t *)
#define DIMENSIONS(api) CALL(api, 62, Status *, const void *, int64_t *, size_t)
#define TYPE_AND_SHAPE(api) CALL(api, 65, Status *, const void *, void **)
#define FLOAT_ATTRIBUTE(api) CALL(api, 85, Status *, const void *, const char *, float *)
#define INT_ATTRIBUTE(api) CALL(api, 86, Status *, const void *, const char *, int64_t *)
#define INPUT_COUNT(api) CALL(api, 88, Status *, const void *, size_t *)
#define OUTPUT_COUNT(api) CALL(api, 89, Status *, const void *, size_t *)
#define INPUT(api) CALL(api, 90, Status *, const void *, size_t, const void **)
#define OUTPUT(api) CALL(api, 91, Status *, void *, size_t, const int64_t *, size_t, void **)
#define RELEASE_SHAPE(api) CALL(api, 99, void, void *)
#define GPU_STREAM(api) CALL(api, 193, Status *, const void *, void **)

#define TRY(call)                     \
    do {                              \
        Status *failed = (call);      \
        if (failed) return failed;    \
    } while (0)

static Status *failure(Api api, const char *what, const char *why) {
    char message[256];
    snprintf(message, sizeof message, "sdflow.GroupNorm: %s%s%s", what, why ? ": " : "", why ? why : "");
    return CREATE_STATUS(api)(1 /* ORT_FAIL */, message);
}

/* The kernels, loaded once into the context that is current when the first session is made. */

__asm__(".section .rodata\n.balign 64\nsdflow_cubin:\n.incbin \"" CUBIN "\"\n.byte 0\n.previous");
extern const char sdflow_cubin[] __attribute__((visibility("hidden")));

/* CUlaunchConfig and CUlaunchAttribute of cuda.h. */
typedef struct {
    int id, padding;
    union {
        char size[64];
        unsigned dimensions[3];
    } value;
} Attribute;

typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned attribute_count;
} Launch;

enum { CLUSTER_DIMENSION = 4 };

static struct {
    pthread_mutex_t lock;
    void *context, *sums, *apply;
    void *held_4, *held_8; /* null before compute capability 9.0 */
    int processors;
    int (*launch)(const Launch *, void *, void **, void **);
} gpu = {.lock = PTHREAD_MUTEX_INITIALIZER};

static const char *load_locked(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context = 0, *module = 0;
    int device = 0;
    if (!driver) return "libcuda.so.1 cannot be loaded";
    int (*current)(void **) = dlsym(driver, "cuCtxGetCurrent");
    int (*device_of)(int *) = dlsym(driver, "cuCtxGetDevice");
    int (*attribute)(int *, int, int) = dlsym(driver, "cuDeviceGetAttribute");
    int (*load)(void **, const void *) = dlsym(driver, "cuModuleLoadData");
    int (*function)(void **, void *, const char *) = dlsym(driver, "cuModuleGetFunction");
    gpu.launch = dlsym(driver, "cuLaunchKernelEx");
    if (!current || !device_of || !attribute || !load || !function || !gpu.launch) return "the driver is too old";
    if (current(&context) || !context) return "there is no CUDA context";
    if (gpu.context) return gpu.context == context ? 0 : "the kernels are in use on another device of this process";
    if (device_of(&device) || attribute(&gpu.processors, 16 /* MULTIPROCESSOR_COUNT */, device)) return "no device";
    if (load(&module, sdflow_cubin)) return "the kernels were compiled for another device";
    if (function(&gpu.sums, module, "group_norm_sums") || function(&gpu.apply, module, "group_norm_apply"))
        return "the kernels are not complete";
    if (function(&gpu.held_4, module, "group_norm_held_4") || function(&gpu.held_8, module, "group_norm_held_8"))
        gpu.held_4 = gpu.held_8 = 0;
    gpu.context = context;
    return 0;
}

static const char *load_kernels(void) {
    pthread_mutex_lock(&gpu.lock);
    const char *why = load_locked();
    pthread_mutex_unlock(&gpu.lock);
    return why;
}

/* As in group_norm.cu. */
typedef struct {
    int rows, lanes, channels_per_group, groups, rows_per_block, skip_rows;
} Layout;

typedef struct {
    int rows, row_lanes, lanes, channels_per_group, groups, rows_per_block, skip_rows, silu;
    float epsilon;
} Slice;

typedef struct {
    Api api;
    float epsilon;
    int64_t groups, activation;
} Kernel;

static Status *create(const void *op, Api api, const void *info, void **result) {
    (void)op;
    const char *why = load_kernels();
    if (why) return failure(api, "cannot run", why);
    Kernel *kernel = calloc(1, sizeof *kernel);
    if (!kernel) return failure(api, "out of memory", 0);
    kernel->api = api;
    Status *failed = FLOAT_ATTRIBUTE(api)(info, "epsilon", &kernel->epsilon);
    if (!failed) failed = INT_ATTRIBUTE(api)(info, "groups", &kernel->groups);
    if (!failed) failed = INT_ATTRIBUTE(api)(info, "activation", &kernel->activation);
    if (!failed && (kernel->groups < 1 || kernel->groups > MAX_GROUPS)) failed = failure(api, "1 to 32 groups, please", 0);
    if (failed) {
        free(kernel);
        return failed;
    }
    *result = kernel;
    return 0;
}

static void destroy(void *kernel) { free(kernel); }

static Status *shape_of(Api api, const void *value, int64_t *dims, size_t *count) {
    void *info = 0;
    TRY(TYPE_AND_SHAPE(api)(value, &info));
    Status *failed = DIMENSIONS_COUNT(api)(info, count);
    if (!failed && *count > 4) failed = failure(api, "more than four axes", 0);
    if (!failed) failed = DIMENSIONS(api)(info, dims, *count);
    RELEASE_SHAPE(api)(info);
    return failed;
}

static Status *optional_input(Api api, const void *context, size_t index, const void **value) {
    size_t count = 0;
    *value = 0;
    TRY(INPUT_COUNT(api)(context, &count));
    return index < count ? INPUT(api)(context, index, value) : 0;
}

static Status *data(Api api, const void *value, void **pointer) {
    *pointer = 0;
    return value ? TENSOR_DATA(api)(value, pointer) : 0;
}

static int ceil_div(int a, int b) { return (a + b - 1) / b; }

enum { X, GAMMA, BETA, SKIP, BIAS, INPUTS };

/* What is to be done. rows: positions of an image; skip_rows: 0 without, 1 when it holds for all positions. */
typedef struct {
    const Kernel *kernel;
    void *context, *stream, *at[INPUTS], *y, *sum;
    int images, rows, channels, skip_rows;
} Work;

static int round_up(int value, int unit) { return ceil_div(value, unit) * unit; }

static int launch(void *function, Launch config, void **arguments) {
    config.attribute_count = config.attributes ? 1 : 0;
    return gpu.launch(&config, function, arguments, 0);
}

/* How a slice of whole groups is held by a cluster of blocks. Returns 0 where images are too large. */
static int plan_held(const Work *work, Slice *slice, int *cluster, int *threads) {
    const int width = work->channels / (int)work->kernel->groups, row_lanes = work->channels / VECTOR;
    int lanes = 1; /* whole groups, whole vectors, and 64 bytes in a row if there are */
    while (lanes * VECTOR % width) ++lanes;
    while (lanes < 4 && row_lanes % (2 * lanes) == 0) lanes *= 2;
    *slice = (Slice){work->rows, row_lanes, lanes, width, lanes * VECTOR / width, 0, work->skip_rows,
                     work->kernel->activation == 1, work->kernel->epsilon};
    if (!gpu.held_4 || slice->groups > 32) return 0;
    int unit = 32; /* threads come in warps, and in rows */
    while (unit % lanes) unit += 32;
    const int slices = row_lanes / lanes, most = THREADS / unit * unit;
    if (!most) return 0;
    for (*cluster = 1;; *cluster *= 2) {
        slice->rows_per_block = ceil_div(work->rows, *cluster);
        const int vectors = slice->rows_per_block * lanes, more = 2 * *cluster;
        const int can_grow = more <= 8 && more * slice->groups <= 32 && more <= work->rows;
        if (can_grow && (vectors > 8 * most || work->images * slices * more * 4 <= gpu.processors * 5)) continue;
        *threads = round_up(ceil_div(vectors, 4), unit);
        if (*threads > most) *threads = most;
        return vectors <= 8 * most;
    }
}

static Status *hold(const Work *work, Slice slice, int cluster, int threads) {
    Attribute attribute = {.id = CLUSTER_DIMENSION, .value.dimensions = {cluster, 1, 1}};
    Launch config = {{cluster, slice.row_lanes / slice.lanes, work->images}, {threads, 1, 1}, 0, work->stream, &attribute, 0};
    Work copy = *work;
    void *arguments[] = {&copy.at[X], &copy.at[SKIP], &copy.at[BIAS], &copy.at[GAMMA], &copy.at[BETA], &copy.y, &copy.sum,
                         &slice};
    void *function = slice.rows_per_block <= 4 * (threads / slice.lanes) ? gpu.held_4 : gpu.held_8;
    return launch(function, config, arguments) ? failure(work->kernel->api, "the kernel cannot be launched", 0) : 0;
}

/* As many blocks for an image as keep all multiprocessors busy, each with at least one row for each of its threads. */
static int rows_per_block(const Work *work, int step, int per_processor) {
    const int wanted = ceil_div(gpu.processors * per_processor, work->images), most = ceil_div(work->rows, step);
    return ceil_div(work->rows, wanted < most ? wanted : most);
}

static Status *sum_and_apply(const Work *work) {
    Work from = *work;
    Api api = work->kernel->api;
    const int lanes = work->channels / VECTOR, groups = (int)work->kernel->groups;
    const int step = THREADS / lanes, threads = round_up(lanes * step, 32);
    Layout layout = {work->rows, lanes, work->channels / groups, groups, rows_per_block(work, step, SUMS_PER_PROCESSOR),
                     work->skip_rows};
    int parts = ceil_div(work->rows, layout.rows_per_block), silu = work->kernel->activation == 1;
    float epsilon = work->kernel->epsilon;
    const int64_t scratch_dims[4] = {work->images, parts, groups, 2};
    void *value, *scratch;
    TRY(OUTPUT(api)(work->context, 1, scratch_dims, 4, &value));
    TRY(data(api, value, &scratch));

    void *sums_arguments[] = {&from.at[X], &from.at[SKIP], &from.at[BIAS], &from.sum, &scratch, &layout};
    Launch config = {{parts, work->images, 1}, {threads, 1, 1}, 0, work->stream, 0, 0};
    if (launch(gpu.sums, config, sums_arguments)) return failure(api, "the kernel of the sums cannot be launched", 0);

    if (work->sum) {
        from.at[X] = work->sum;
        from.at[SKIP] = from.at[BIAS] = 0;
        layout.skip_rows = 0;
    }
    layout.rows_per_block = rows_per_block(work, step, APPLY_PER_PROCESSOR);
    config.grid[0] = ceil_div(work->rows, layout.rows_per_block);
    void *arguments[] = {&from.at[X], &from.at[SKIP], &from.at[BIAS], &from.at[GAMMA], &from.at[BETA], &scratch, &from.y,
                         &layout, &parts, &epsilon, &silu};
    return launch(gpu.apply, config, arguments) ? failure(api, "the kernel that normalizes cannot be launched", 0) : 0;
}

static Status *compute(void *op_kernel, void *context) {
    const Kernel *kernel = op_kernel;
    Api api = kernel->api;
    Work work = {.kernel = kernel, .context = context};
    const void *inputs[INPUTS];
    void *value;
    int64_t dims[4], skip_dims[4];
    size_t rank = 0, skip_rank = 0, outputs = 0;
    for (size_t i = 0; i < INPUTS; ++i) {
        TRY(optional_input(api, context, i, &inputs[i]));
        TRY(data(api, inputs[i], &work.at[i]));
    }
    TRY(shape_of(api, inputs[X], dims, &rank));
    if (rank != 4) return failure(api, "x must have four axes", 0);
    work.images = (int)dims[0], work.rows = (int)(dims[1] * dims[2]), work.channels = (int)dims[3];
    const int width = work.channels / (int)kernel->groups;
    if (work.channels % VECTOR || work.channels % kernel->groups || work.channels / VECTOR > THREADS ||
        (width < VECTOR && width != 4))
        return failure(api, "not for this number of channels", 0);
    if (inputs[SKIP]) {
        TRY(shape_of(api, inputs[SKIP], skip_dims, &skip_rank));
        int64_t elements = 1;
        for (size_t i = 0; i < skip_rank; ++i) elements *= skip_dims[i];
        if (elements == (int64_t)work.images * work.rows * work.channels) work.skip_rows = work.rows;
        else if (elements == (int64_t)work.images * work.channels) work.skip_rows = 1;
        else return failure(api, "skip has another shape than x", 0);
    }
    TRY(OUTPUT(api)(context, 0, dims, 4, &value));
    TRY(data(api, value, &work.y));
    TRY(OUTPUT_COUNT(api)(context, &outputs));
    if (outputs > 2) {
        TRY(OUTPUT(api)(context, 2, dims, 4, &value));
        TRY(data(api, value, &work.sum));
    }
    TRY(GPU_STREAM(api)(context, &work.stream));
    const int64_t nothing = 0;
    if (work.images == 0 || work.rows == 0) return OUTPUT(api)(context, 1, &nothing, 1, &value);
    Slice slice;
    int cluster, threads;
    if (!plan_held(&work, &slice, &cluster, &threads)) return sum_and_apply(&work);
    TRY(OUTPUT(api)(context, 1, &nothing, 1, &value));
    return hold(&work, slice, cluster, threads);
}

/* OrtCustomOp, as far as version 16 of the interface reads it. */
typedef struct Op {
    uint32_t version;
    void *(*create_kernel)(const struct Op *, Api, const void *);
    const char *(*name)(const struct Op *);
    const char *(*provider)(const struct Op *);
    int (*input_type)(const struct Op *, size_t);
    size_t (*input_count)(const struct Op *);
    int (*output_type)(const struct Op *, size_t);
    size_t (*output_count)(const struct Op *);
    void (*kernel_compute)(void *, void *);
    void (*kernel_destroy)(void *);
    int (*input_characteristic)(const struct Op *, size_t);
    int (*output_characteristic)(const struct Op *, size_t);
    int (*input_memory)(const struct Op *, size_t);
    int (*variadic_input_min)(const struct Op *);
    int (*variadic_input_homogeneous)(const struct Op *);
    int (*variadic_output_min)(const struct Op *);
    int (*variadic_output_homogeneous)(const struct Op *);
    Status *(*create_kernel_v2)(const void *, Api, const void *, void **);
    Status *(*kernel_compute_v2)(void *, void *);
} Op;

static const char *name(const Op *op) { return (void)op, "GroupNorm"; }
static const char *provider(const Op *op) { return (void)op, "CUDAExecutionProvider"; }
static int input_type(const Op *op, size_t i) { return (void)op, i == 1 || i == 2 ? FLOAT : FLOAT16; }
static size_t input_count(const Op *op) { return (void)op, 5; }
static int output_type(const Op *op, size_t i) { return (void)op, i == 1 ? FLOAT : FLOAT16; }
static size_t output_count(const Op *op) { return (void)op, 3; }
static int input_characteristic(const Op *op, size_t i) { return (void)op, i < 3 ? REQUIRED : OPTIONAL; }
static int output_characteristic(const Op *op, size_t i) { return (void)op, i < 2 ? REQUIRED : OPTIONAL; }
static int on_device(const Op *op, size_t i) { return (void)op, (void)i, 0; }
static int none(const Op *op) { return (void)op, 0; }

static const Op group_norm = {
    ORT_VERSION, 0, name, provider, input_type, input_count, output_type, output_count, 0, destroy,
    input_characteristic, output_characteristic, on_device, none, none, none, none, create, compute,
};

typedef struct {
    Api (*api)(uint32_t);
} ApiBase;

__attribute__((visibility("default"))) Status *RegisterCustomOps(void *options, const ApiBase *base) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static void *domain = 0; /* sessions refer to it as long as they live */
    Api api = base->api(ORT_VERSION);
    Status *failed = 0;
    pthread_mutex_lock(&lock);
    if (!domain) {
        failed = CREATE_DOMAIN(api)("sdflow", &domain);
        if (!failed) failed = DOMAIN_ADD(api)(domain, &group_norm);
    }
    pthread_mutex_unlock(&lock);
    return failed ? failed : ADD_DOMAIN(api)(options, domain);
}
