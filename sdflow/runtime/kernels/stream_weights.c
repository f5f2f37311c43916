/* sdflow.StreamWeights: copies weights to the device one segment ahead of the nodes that read them.
 *
 * inputs: values of any type (variadic). outputs: the first of them, in place: nodes that read an output run after this one.
 * Further inputs have no output: this node runs after the nodes that make them.
 *
 * through: how many outputs there are. waits: whether all copies queued before must be done first. count: of the copies that this node queues; copy i moves
 * `bytes<i>` from the host address `from<i>` to the device address `to<i>`. What reads `to<i>` so far must be queued. delay:
 * on the CPU, microseconds before the copies start.
 *
 * On CUDA, copies are queued on a stream of their own. Events order it with the session's stream, also within a captured
 * graph; a node that waits and copies nothing joins both. On the CPU, a thread copies.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "ort.h"

#define WITHOUT_TIMING 2
#define NOT_BLOCKING 1 /* with the default stream */
#define MOST_OUTPUTS 64

typedef struct {
    void *from;
    uint64_t to;
    int64_t bytes;
} Copy;

typedef struct {
    Api api;
    Copy *copies;
    int count, waits, on_cpu;
    int64_t delay;
    void *reached, *copied; /* events of the session's stream, and of the copies' */
} Kernel;

static struct {
    void *stream, *context;
    int (*record)(void *, void *), (*wait)(void *, void *, unsigned);
    int (*copy)(uint64_t, const void *, size_t, void *), (*within)(uint64_t, uint64_t, size_t, void *);
    int (*create_event)(void **, unsigned), (*destroy_event)(void *);
} cuda;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_t thread; /* that copies, if `copying` */
static int copying;
static int64_t moved;

/* Bytes of values that were copied because ONNX Runtime did not let an output have its input's memory. */
__attribute__((visibility("default"))) int64_t sdflow_moved_bytes(void) { return moved; }

static const char *open_cuda(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context = 0;
    if (!driver) return "libcuda.so.1 cannot be loaded";
    int (*current)(void **) = dlsym(driver, "cuCtxGetCurrent");
    int (*create_stream)(void **, unsigned) = dlsym(driver, "cuStreamCreate");
    cuda.record = dlsym(driver, "cuEventRecord");
    cuda.wait = dlsym(driver, "cuStreamWaitEvent");
    cuda.copy = dlsym(driver, "cuMemcpyHtoDAsync_v2");
    cuda.within = dlsym(driver, "cuMemcpyDtoDAsync_v2");
    cuda.create_event = dlsym(driver, "cuEventCreate");
    cuda.destroy_event = dlsym(driver, "cuEventDestroy_v2");
    if (!current || !create_stream || !cuda.record || !cuda.wait || !cuda.copy || !cuda.within || !cuda.create_event ||
        !cuda.destroy_event)
        return "the driver is too old";
    if (current(&context) || !context) return "there is no CUDA context";
    if (cuda.stream) return cuda.context == context ? 0 : "weights stream to another device of this process";
    const int error = create_stream(&cuda.stream, NOT_BLOCKING);
    if (error) {
        cuda.stream = 0;
        return driver_error(error);
    }
    cuda.context = context;
    return 0;
}

/* Waits for the thread that copies. */
static void finish_copies(void) {
    if (copying) pthread_join(thread, 0);
    copying = 0;
}

typedef struct {
    const Kernel *kernel;
    pthread_t before; /* the thread that copies first, if `follows` */
    int follows;
} Job;

static void *copy_all(void *of) {
    const Job job = *(const Job *)of;
    const Kernel *kernel = job.kernel;
    free(of);
    if (job.follows) pthread_join(job.before, 0);
    const struct timespec delay = {kernel->delay / 1000000, kernel->delay % 1000000 * 1000};
    if (kernel->delay) nanosleep(&delay, 0);
    for (int i = 0; i < kernel->count; ++i)
        memcpy((void *)kernel->copies[i].to, kernel->copies[i].from, (size_t)kernel->copies[i].bytes);
    return 0;
}

static Status *read_copies(Api api, const void *info, Kernel *kernel) {
    int64_t number;
    TRY(INT_ATTRIBUTE(api)(info, "waits", &number));
    kernel->waits = number != 0;
    TRY(INT_ATTRIBUTE(api)(info, "delay", &kernel->delay));
    TRY(INT_ATTRIBUTE(api)(info, "count", &number));
    kernel->copies = calloc((size_t)number + 1, sizeof *kernel->copies);
    if (!kernel->copies) return failure(api, "StreamWeights", "out of memory");
    for (kernel->count = 0; kernel->count < number; ++kernel->count) {
        static const char *const names[] = {"from", "to", "bytes"};
        int64_t values[3];
        for (int i = 0; i < 3; ++i) {
            char name[32];
            snprintf(name, sizeof name, "%s%d", names[i], kernel->count);
            TRY(INT_ATTRIBUTE(api)(info, name, &values[i]));
        }
        kernel->copies[kernel->count] = (Copy){(void *)(uintptr_t)values[0], (uint64_t)values[1], values[2]};
    }
    return 0;
}

static void destroy(void *of) {
    Kernel *kernel = of;
    pthread_mutex_lock(&lock);
    if (kernel->on_cpu) finish_copies();
    pthread_mutex_unlock(&lock);
    if (kernel->reached) cuda.destroy_event(kernel->reached);
    if (kernel->copied) cuda.destroy_event(kernel->copied);
    free(kernel->copies);
    free(kernel);
}

static Status *create(const void *op, Api api, const void *info, void **result) {
    Kernel *kernel = calloc(1, sizeof *kernel);
    if (!kernel) return failure(api, "StreamWeights", "out of memory");
    kernel->api = api;
    kernel->on_cpu = op == &stream_weights_on_cpu;
    Status *failed = read_copies(api, info, kernel);
    if (!failed && !kernel->on_cpu) { /* now, because a capture forbids it */
        pthread_mutex_lock(&lock);
        const char *why = open_cuda();
        pthread_mutex_unlock(&lock);
        int error = 0;
        if (!why && ((error = cuda.create_event(&kernel->reached, WITHOUT_TIMING)) ||
                     (error = cuda.create_event(&kernel->copied, WITHOUT_TIMING))))
            why = driver_error(error);
        if (why) failed = failure(api, "StreamWeights cannot run", why);
    }
    if (failed)
        destroy(kernel);
    else
        *result = kernel;
    return failed;
}

static int size_of(int type) {
    switch (type) {
    case UINT8: case 3 /* int8 */: case 9 /* bool */: return 1;
    case FLOAT16: case BFLOAT16: return 2;
    case FLOAT: case 6 /* int32 */: return 4;
    case 7 /* int64 */: case 11 /* double */: return 8;
    }
    return 0;
}

/* Gives each output the value of its input: nothing to do where ONNX Runtime gave it the same memory. */
static Status *pass(const Kernel *kernel, void *context, void *stream) {
    Api api = kernel->api;
    size_t count = 0;
    TRY(OUTPUT_COUNT(api)(context, &count));
    for (size_t i = 0; i < count; ++i) {
        const void *value;
        void *from, *to, *info;
        int64_t dims[MOST_AXES], elements;
        size_t rank = 0;
        int type = 0;
        TRY(input(api, context, i, &value, &from));
        TRY(shape_of(api, value, dims, &rank));
        TRY(elements_of(api, value, &elements));
        TRY(output(api, context, i, dims, rank, &to));
        if (to == from || !elements) continue;
        TRY(TYPE_AND_SHAPE(api)(value, &info));
        Status *failed = ELEMENT_TYPE(api)(info, &type);
        RELEASE_SHAPE(api)(info);
        if (failed) return failed;
        const size_t bytes = (size_t)elements * size_of(type);
        if (!bytes) return failure(api, "StreamWeights: not for values of this type", 0);
        moved += (int64_t)bytes;
        if (kernel->on_cpu) {
            memcpy(to, from, bytes);
            continue;
        }
        const int error = cuda.within((uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, bytes, stream);
        if (error) return failure(api, "StreamWeights cannot copy a value", driver_error(error));
    }
    return 0;
}

static Status *compute_on_cpu(const Kernel *kernel, void *context) {
    int error = 0;
    pthread_mutex_lock(&lock);
    if (kernel->waits) finish_copies();
    if (kernel->count) {
        Job *job = malloc(sizeof *job);
        if (job) *job = (Job){kernel, thread, copying};
        error = !job || pthread_create(&thread, 0, copy_all, job);
        if (error)
            free(job);
        else
            copying = 1;
    }
    pthread_mutex_unlock(&lock);
    if (error) return failure(kernel->api, "StreamWeights", "there can be no thread");
    return pass(kernel, context, 0);
}

static Status *compute(void *op_kernel, void *context) {
    const Kernel *kernel = op_kernel;
    Api api = kernel->api;
    if (kernel->on_cpu) return compute_on_cpu(kernel, context);
    void *stream;
    int error = 0;
    TRY(GPU_STREAM(api)(context, &stream));
    if (kernel->waits) {
        if ((error = cuda.record(kernel->copied, cuda.stream)) || (error = cuda.wait(stream, kernel->copied, 0)))
            return failure(api, "StreamWeights cannot wait for its copies", driver_error(error));
        gpu.joined = 1;
    }
    if (kernel->count) {
        if ((error = cuda.record(kernel->reached, stream)) || (error = cuda.wait(cuda.stream, kernel->reached, 0)))
            return failure(api, "StreamWeights cannot queue copies", driver_error(error));
        for (int i = 0; i < kernel->count; ++i) {
            const Copy *each = &kernel->copies[i];
            if ((error = cuda.copy(each->to, each->from, (size_t)each->bytes, cuda.stream)))
                return failure(api, "StreamWeights cannot copy weights", driver_error(error));
        }
    }
    return pass(kernel, context, stream);
}

static const char *name(const Op *op) { return (void)op, "StreamWeights"; }
static const char *on_cpu(const Op *op) { return (void)op, "CPUExecutionProvider"; }
static int any_type(const Op *op, size_t i) { return (void)op, (void)i, 0; }
static int variadic(const Op *op, size_t i) { return (void)op, (void)i, 2; }
static int one(const Op *op) { return (void)op, 1; }

/* Each output has the type and shape of its input; what is not known of a shape stays so. */
static Status *infer_shapes(const Op *op, void *context) {
    (void)op;
    Api api = registered_api;
    const void *attribute = 0;
    int64_t through = 0;
    size_t size = 0, rank = 0;
    TRY(INFERRED_ATTRIBUTE(api)(context, "through", &attribute));
    TRY(READ_ATTRIBUTE(api)(attribute, 1 /* an integer */, &through, sizeof through, &size));
    for (int64_t i = 0; i < through; ++i) {
        void *info = 0;
        TRY(INFERRED_INPUT(api)(context, (size_t)i, &info));
        TRY(DIMENSIONS_COUNT(api)(info, &rank));
        if (rank) TRY(INFERRED_OUTPUT(api)(context, (size_t)i, info)); /* without axes: unknown */
    }
    return 0;
}

static int same[MOST_OUTPUTS];

/* Output i has the memory of input i. */
static size_t alias(int **inputs, int **outputs) {
    for (int i = 0; i < MOST_OUTPUTS; ++i) same[i] = i;
    *inputs = *outputs = same;
    return MOST_OUTPUTS;
}
static void keep_alias(int *inputs, int *outputs) { (void)inputs, (void)outputs; }

#define STREAM(PROVIDER)                                                                                             \
    {                                                                                                                \
        ALIAS_VERSION, 0, name, PROVIDER, any_type, one_tensor, any_type, one_tensor, 0, destroy, variadic, variadic, \
            on_device, one, none, one, none, create, compute, infer_shapes, 0, 0, 0, 0, alias, keep_alias,                     \
    }
const Op stream_weights = STREAM(on_cuda), stream_weights_on_cpu = STREAM(on_cpu);
