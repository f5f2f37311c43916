/* sdflow.Geglu: MatMul and BiasSplitGelu of its result.
 *
 * inputs: x (..., K) float16, weight (K, 2 N) float16, bias (2 N) float16. output: (..., N). K is a multiple of 8, N of 64. On
 * compute capability 9.0 alone.
 */
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
    return why ? failure(api, "Geglu cannot run", why) : keep(api, "Geglu", &api, sizeof api, result);
}

static int describe(MatrixMap *map, void *at, int64_t rows, int64_t columns, unsigned box_rows) {
    return map_matrix(map, TENSOR_MAP_FLOAT16, at, rows, columns, box_rows, L2_PROMOTION_256);
}

static Status *compute(void *op_kernel, void *context) {
    Api api = *(Api *)op_kernel;
    const void *x, *weight, *bias;
    void *from, *by, *with, *y, *stream;
    int64_t dims[MOST_AXES], weight_dims[MOST_AXES], elements, rows = 1;
    size_t rank = 0, weight_rank = 0;
    TRY(input(api, context, 0, &x, &from));
    TRY(input(api, context, 1, &weight, &by));
    TRY(input(api, context, 2, &bias, &with));
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
    TRY(output(api, context, 0, dims, rank, &y));
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
static size_t input_count(const Op *op) { return (void)op, 3; }

const Op geglu = OP(name, float16, input_count, required, float16, one_tensor, required);
