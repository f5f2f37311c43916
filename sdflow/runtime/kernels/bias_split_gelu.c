/* sdflow.BiasSplitGelu: that of com.microsoft, for any width.
 *
 * inputs: x (..., 2 C) float16, bias (2 C) float16. output: (..., C), the first half times the GELU of the second one.
 */
#include <stdlib.h>

#include "ort.h"

static Status *create(const void *op, Api api, const void *info, void **result) {
    (void)op, (void)info;
    const char *why = load_kernels(PART_bias_split_gelu);
    if (why) return failure(api, "BiasSplitGelu cannot run", why);
    Api *kernel = malloc(sizeof *kernel);
    if (!kernel) return failure(api, "BiasSplitGelu: out of memory", 0);
    *kernel = api;
    *result = kernel;
    return 0;
}

static Status *compute(void *op_kernel, void *context) {
    Api api = *(Api *)op_kernel;
    const void *x, *bias;
    void *y, *stream, *value, *from, *with;
    int64_t dims[MOST_AXES];
    size_t rank = 0;
    TRY(INPUT(api)(context, 0, &x));
    TRY(INPUT(api)(context, 1, &bias));
    TRY(data(api, x, &from));
    TRY(data(api, bias, &with));
    TRY(shape_of(api, x, dims, &rank));
    if (!rank || dims[rank - 1] % (2 * VECTOR)) return failure(api, "BiasSplitGelu: not for this number of channels", 0);
    dims[rank - 1] /= 2;
    TRY(OUTPUT(api)(context, 0, dims, rank, &value));
    TRY(data(api, value, &y));
    TRY(GPU_STREAM(api)(context, &stream));
    int lanes = (int)dims[rank - 1] / VECTOR, rows = 1;
    for (size_t i = 0; i + 1 < rank; ++i) rows *= (int)dims[i];
    if (!rows || !lanes) return 0;
    /* A thread has its channels' bias in registers and goes down the rows. */
    const int wide = lanes < GELU_THREADS ? lanes : GELU_THREADS, deep = GELU_THREADS / wide;
    const int columns = ceil_div(lanes, wide), most = ceil_div(rows, deep);
    int blocks = ceil_div(gpu.processors * GELU_PER_PROCESSOR, columns);
    if (blocks > most) blocks = most;
    void *arguments[] = {&from, &with, &y, &rows, &lanes};
    const Launch config = {{columns, blocks, 1}, {wide, deep, 1}, 0, stream, 0, 0};
    const char *why = launch(gpu.bias_split_gelu, config, arguments);
    return why ? failure(api, "BiasSplitGelu cannot be launched", why) : 0;
}

static const char *name(const Op *op) { return (void)op, "BiasSplitGelu"; }
static int type(const Op *op, size_t i) { return (void)op, (void)i, FLOAT16; }
static size_t input_count(const Op *op) { return (void)op, 2; }
static size_t output_count(const Op *op) { return (void)op, 1; }
static int required(const Op *op, size_t i) { return (void)op, (void)i, REQUIRED; }

const Op bias_split_gelu = {
    ORT_VERSION, 0, name, on_cuda, type, input_count, type, output_count, 0, free,
    required, required, on_device, none, none, none, none, create, compute,
};
