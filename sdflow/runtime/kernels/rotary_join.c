/* sdflow.RotaryJoin, RotaryJoinBfloat16: columns of one matrix and those of a gated product, side by side.
 *
 * inputs, float16 or bfloat16: front (..., F), product (..., any) of as many rows. attributes: column: the first of the product's columns
 * that are read, a, with b behind them; width: of a, and of b; second: whether the sigmoid is of b.
 * output: (..., F + width), front and silu(a) b, or a silu(b).
 */
#include <stdlib.h>

#include "ort.h"

#define WIDTH 2        /* bytes of a value */
#define MOST (1 << 24) /* rows, and channels */
#define SEVERAL 8      /* blocks of a multiprocessor */

/* As in rotary_join.cu. */
typedef struct {
    const void *front, *gated;
    void *to;
    int rows, before, width;
    int pitch;
    int second;
} Join;

typedef struct {
    Api api;
    int bfloat16;
    int64_t column, width, second;
} Kernel;

static Status *create(Api api, const void *info, int bfloat16, void **result) {
    const char *why = load_kernels();
    if (why) return failure(api, "RotaryJoin cannot run", why);
    Kernel *kernel = calloc(1, sizeof *kernel);
    if (!kernel) return failure(api, "RotaryJoin: out of memory", 0);
    *kernel = (Kernel){.api = api, .bfloat16 = bfloat16};
    Status *failed = INT_ATTRIBUTE(api)(info, "column", &kernel->column);
    if (!failed) failed = INT_ATTRIBUTE(api)(info, "width", &kernel->width);
    if (!failed) failed = INT_ATTRIBUTE(api)(info, "second", &kernel->second);
    if (failed) free(kernel);
    else *result = kernel;
    return failed;
}

static Status *create_half(const void *op, Api api, const void *info, void **result) {
    return (void)op, create(api, info, 0, result);
}

static Status *create_bfloat16(const void *op, Api api, const void *info, void **result) {
    return (void)op, create(api, info, 1, result);
}

static Status *compute(void *op_kernel, void *context) {
    const Kernel *kernel = op_kernel;
    Api api = kernel->api;
    const void *front, *product;
    void *from, *gated, *value, *to, *stream;
    int64_t dims[MOST_AXES], other[MOST_AXES], rows = 1, others = 1;
    size_t rank = 0, other_rank = 0;
    TRY(INPUT(api)(context, 0, &front));
    TRY(INPUT(api)(context, 1, &product));
    TRY(data(api, front, &from));
    TRY(data(api, product, &gated));
    TRY(shape_of(api, front, dims, &rank));
    TRY(shape_of(api, product, other, &other_rank));
    if (!rank || !other_rank) return failure(api, "RotaryJoin: its inputs have no columns", 0);
    for (size_t i = 0; i + 1 < rank; ++i) rows *= dims[i];
    for (size_t i = 0; i + 1 < other_rank; ++i) others *= other[i];
    const int64_t before = dims[rank - 1], pitch = other[other_rank - 1], column = kernel->column, width = kernel->width;
    if (rows != others || column < 0 || width < VECTOR || width > MOST || column + 2 * width > pitch || before % VECTOR ||
        pitch % VECTOR || column % VECTOR || width % VECTOR)
        return failure(api, "RotaryJoin: its inputs do not fit together", 0);
    if (rows > MOST || pitch > MOST || before > MOST) return failure(api, "RotaryJoin: its inputs are too large", 0);
    dims[rank - 1] = before + width;
    TRY(OUTPUT(api)(context, 0, dims, rank, &value));
    TRY(data(api, value, &to));
    TRY(GPU_STREAM(api)(context, &stream));
    if (!rows) return 0;
    Join all = {.front = from, .gated = (const char *)gated + column * WIDTH, .to = to, .rows = (int)rows,
                .before = (int)before / VECTOR, .width = (int)width / VECTOR, .pitch = (int)pitch / VECTOR,
                .second = kernel->second != 0};
    const int columns = ceil_div(all.before + all.width, ROTARY_JOIN_THREADS);
    int blocks = ceil_div(gpu.processors * SEVERAL, columns);
    if (blocks > all.rows) blocks = all.rows;
    void *arguments[] = {&all};
    const Launch config = {{columns, blocks, 1}, {ROTARY_JOIN_THREADS, 1, 1}, 0, stream, 0, 0};
    const char *why = launch(kernel->bfloat16 ? gpu.rotary_join_bfloat16 : gpu.rotary_join_float16, config, arguments);
    return why ? failure(api, "RotaryJoin cannot be launched", why) : 0;
}

static const char *name(const Op *op) { return (void)op, "RotaryJoin"; }
static const char *name_bfloat16(const Op *op) { return (void)op, "RotaryJoinBfloat16"; }
static int half(const Op *op, size_t i) { return (void)op, (void)i, FLOAT16; }
static int bfloat16(const Op *op, size_t i) { return (void)op, (void)i, BFLOAT16; }
static size_t input_count(const Op *op) { return (void)op, 2; }
static size_t output_count(const Op *op) { return (void)op, 1; }
static int required(const Op *op, size_t i) { return (void)op, (void)i, REQUIRED; }

const Op op_rotary_join = {
    ORT_VERSION, 0, name, on_cuda, half, input_count, half, output_count, 0, free,
    required, required, on_device, none, none, none, none, create_half, compute,
};

const Op op_rotary_join_bfloat16 = {
    ORT_VERSION, 0, name_bfloat16, on_cuda, bfloat16, input_count, bfloat16, output_count, 0, free,
    required, required, on_device, none, none, none, none, create_bfloat16, compute,
};
