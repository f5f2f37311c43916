/* sdflow.BiasSplitGelu: that of com.microsoft, for any width.
 *
 * inputs: x (..., 2 C) float16, bias (2 C) float16. output: (..., C), the first half times the GELU of the second one.
 */
#include "ort.h"

static Status *create(const void *op, Api api, const void *info, void **result) {
    (void)op, (void)info;
    const char *why = load_kernels(PART_bias_split_gelu);
    return why ? failure(api, "BiasSplitGelu cannot run", why) : keep(api, "BiasSplitGelu", &api, sizeof api, result);
}

static Status *compute(void *op_kernel, void *context) {
    Api api = *(Api *)op_kernel;
    const void *x, *bias;
    void *y, *stream, *from, *with;
    int64_t dims[MOST_AXES];
    size_t rank = 0;
    TRY(input(api, context, 0, &x, &from));
    TRY(input(api, context, 1, &bias, &with));
    TRY(shape_of(api, x, dims, &rank));
    if (!rank || dims[rank - 1] % (2 * VECTOR)) return failure(api, "BiasSplitGelu: not for this number of channels", 0);
    dims[rank - 1] /= 2;
    TRY(output(api, context, 0, dims, rank, &y));
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
static size_t input_count(const Op *op) { return (void)op, 2; }

const Op bias_split_gelu = OP(name, float16, input_count, required, float16, one_tensor, required);
