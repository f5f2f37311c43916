/* sdflow.Geglu: MatMul and BiasSplitGelu of its result.
 *
 * inputs: x (..., K) float16, weight (K, 2 N) float16, bias (2 N) float16. output: (..., N). K is a multiple of 8, N of 64. On
 * compute capability 9.0 alone.
 */
#include <stdlib.h>

#include "ort.h"

enum { ROWS = 128, DEPTH = 64, WIDE = 128, NARROW = 64 }; /* as in geglu.cu */

/* The depth from which tiles of WIDE columns are quicker (2 % on an H200), where there are several of them for each
 * multiprocessor: they load less, and what computing gates takes is a smaller part. */
enum { DEEP = 1024, SEVERAL = 4 };

/* As in geglu.cu. */
typedef struct {
    int rows, width, depth, band;
} Size;

static Status *create(const void *op, Api api, const void *info, void **result) {
    (void)op, (void)info;
    const char *why = load_kernels(PART_geglu);
    if (!why && (!gpu.geglu[0] || !gpu.geglu[1])) why = "it is for GPUs of compute capability 9.0";
    if (why) return failure(api, "Geglu cannot run", why);
    Api *kernel = malloc(sizeof *kernel);
    if (!kernel) return failure(api, "Geglu: out of memory", 0);
    *kernel = api;
    *result = kernel;
    return 0;
}

static int describe(MatrixMap *map, void *at, int64_t rows, int64_t columns, unsigned box_rows) {
    return map_matrix(map, TENSOR_MAP_FLOAT16, at, rows, columns, box_rows, L2_PROMOTION_256);
}

static Status *compute(void *op_kernel, void *context) {
    Api api = *(Api *)op_kernel;
    const void *x, *weight, *bias;
    void *from, *by, *with, *value, *y, *stream;
    int64_t dims[MOST_AXES], weight_dims[MOST_AXES], elements, rows = 1;
    size_t rank = 0, weight_rank = 0;
    TRY(INPUT(api)(context, 0, &x));
    TRY(INPUT(api)(context, 1, &weight));
    TRY(INPUT(api)(context, 2, &bias));
    TRY(data(api, x, &from));
    TRY(data(api, weight, &by));
    TRY(data(api, bias, &with));
    TRY(shape_of(api, x, dims, &rank));
    TRY(shape_of(api, weight, weight_dims, &weight_rank));
    TRY(elements_of(api, bias, &elements));
    if (!rank || weight_rank != 2 || weight_dims[0] != dims[rank - 1] || elements != weight_dims[1])
        return failure(api, "Geglu: weight and bias are not of x's size", 0);
    const int64_t depth = weight_dims[0], width = weight_dims[1] / 2;
    for (size_t i = 0; i + 1 < rank; ++i) rows *= dims[i];
    if (!depth || depth % 8 || !width || weight_dims[1] % (2 * NARROW))
        return failure(api, "Geglu: not for this number of channels", 0);
    if (rows > 1 << 24 || width > 1 << 24 || depth > 1 << 24) return failure(api, "Geglu: x or weight is too large", 0);
    dims[rank - 1] = width;
    TRY(OUTPUT(api)(context, 0, dims, rank, &value));
    TRY(data(api, value, &y));
    TRY(GPU_STREAM(api)(context, &stream));
    if (!rows) return 0;
    MatrixMap x_map, weight_map, y_map;
    if (describe(&x_map, from, rows, depth, ROWS) || describe(&weight_map, by, depth, 2 * width, DEPTH) ||
        describe(&y_map, y, rows, width, 64))
        return failure(api, "Geglu: the driver does not describe its tensors", 0);
    const int64_t down = (rows + ROWS - 1) / ROWS;
    const int wide = width % WIDE == 0 && depth >= DEEP && down * (width / WIDE) >= (int64_t)SEVERAL * gpu.processors;
    const int64_t tiles = down * (width / (wide ? WIDE : NARROW));
    Size size = {(int)rows, (int)width, (int)depth, wide ? 16 : 4};
    const unsigned blocks = (unsigned)(tiles < gpu.processors ? tiles : gpu.processors);
    const Launch config = {{blocks, 1, 1}, {384, 1, 1}, GEGLU_SHARED, stream, 0, 0};
    void *arguments[] = {&x_map, &weight_map, &y_map, &with, &size};
    const char *why = launch(wide ? gpu.geglu[0] : gpu.geglu[1], config, arguments);
    return why ? failure(api, "Geglu cannot be launched", why) : 0;
}

static const char *name(const Op *op) { return (void)op, "Geglu"; }
static int type(const Op *op, size_t i) { return (void)op, (void)i, FLOAT16; }
static size_t input_count(const Op *op) { return (void)op, 3; }
static size_t output_count(const Op *op) { return (void)op, 1; }
static int required(const Op *op, size_t i) { return (void)op, (void)i, REQUIRED; }

const Op geglu = {
    ORT_VERSION, 0, name, on_cuda, type, input_count, type, output_count, 0, free,
    required, required, on_device, none, none, none, none, create, compute,
};
