/* sdflow.Int8Product, Int8ProductBfloat16: a matrix product of int8, summed in int32, with scales and a bias.
 *
 * inputs: rows (..., K) int8 and their scales (M) float32, as Int8Rows gives them; weight (N, K) int8 and its scales (N) float32; a
 * bias (N) of the output's type, or none. output: (..., N) float16, or bfloat16. K is a multiple of 16, N of 8. attribute: kernel: 0: the
 * one that is likely the quickest, 1: that of wide tiles, 2: of narrow ones, 3: that of compute capability 7.5, for float16, which newer GPUs have too.
 */
#include "ort.h"

#define LARGEST (1 << 24)

enum { ROWS, ROW_SCALES, WEIGHT, WEIGHT_SCALES, BIAS, INPUTS };
enum { WIDE, NARROW, TURING, KERNELS };

/* As in int8_product.cu. */
typedef struct {
    int rows, columns, depth;
} Size;

typedef struct {
    const void *rows, *weight, *row_scales, *weight_scales, *bias;
    void *y;
} Operands;

typedef struct {
    Api api;
    const Op *op;
    int64_t kind; /* 1 + WIDE, ..., 0: any */
} Kernel;

static int in_bfloat16(const Op *op) { return op != &int8_product[0]; }
static const char *name(const Op *op) { return in_bfloat16(op) ? "Int8ProductBfloat16" : "Int8Product"; }

static Status *create(const void *given, Api api, const void *info, void **result) {
    const Op *op = given;
    const char *why = load_kernels(PART_int8);
    if (!why && in_bfloat16(op) && !gpu.int8_product[1][NARROW]) why = TOO_OLD_FOR_BFLOAT16;
    if (why) return failure(api, name(op), why);
    Kernel kernel = {api, op, 0};
    TRY(INT_ATTRIBUTE(api)(info, "kernel", &kernel.kind));
    if (kernel.kind < 0 || kernel.kind > KERNELS || (kernel.kind && !gpu.int8_product[in_bfloat16(op)][kernel.kind - 1]))
        return failure(api, name(op), "this GPU does not have this kernel");
    return keep(api, name(op), &kernel, sizeof kernel, result);
}

static int64_t tiles_of(int64_t rows, int64_t columns, int width) {
    return (rows + INT8_DOWN - 1) / INT8_DOWN * ((columns + width - 1) / width);
}

/* On an H100 narrow tiles were the quicker ones at each of 17 sizes (benchmarks/gpu/products.py int8). */
static int kernel_for(void *const *kernels) { return kernels[NARROW] ? NARROW : TURING; }

static Status *compute(void *op_kernel, void *context) {
    Kernel *kernel = op_kernel;
    Api api = kernel->api;
    const char *const title = name(kernel->op);
    const void *inputs[INPUTS];
    void *at[INPUTS], *to, *stream;
    int64_t dims[MOST_AXES], weight_dims[MOST_AXES], row_scales, scales, biases = 0, rows = 1;
    size_t rank = 0, weight_rank = 0;
    for (size_t i = 0; i < INPUTS; ++i) {
        TRY(input(api, context, i, &inputs[i], &at[i]));
    }
    TRY(shape_of(api, inputs[ROWS], dims, &rank));
    TRY(shape_of(api, inputs[WEIGHT], weight_dims, &weight_rank));
    TRY(elements_of(api, inputs[ROW_SCALES], &row_scales));
    TRY(elements_of(api, inputs[WEIGHT_SCALES], &scales));
    if (inputs[BIAS]) TRY(elements_of(api, inputs[BIAS], &biases));
    if (!rank || weight_rank != 2 || weight_dims[1] != dims[rank - 1] || (inputs[BIAS] && biases != weight_dims[0]))
        return failure(api, title, "weight and bias are not of the rows' size");
    const int64_t n = weight_dims[0], k = weight_dims[1];
    for (size_t i = 0; i + 1 < rank; ++i) rows *= dims[i];
    if (!k || k % 16 || !n || n % VECTOR || rows > LARGEST || n > LARGEST || k > INT8_DEEPEST)
        return failure(api, title, "not for matrices of these sizes");
    if (row_scales != rows || scales != n) return failure(api, title, "there is not a scale for each row and each column");
    dims[rank - 1] = n;
    TRY(output(api, context, 0, dims, rank, &to));
    TRY(GPU_STREAM(api)(context, &stream));
    if (!rows) return 0;
    static const int widths[] = {256, 128, 128}, threads[] = {256, 128, 128};
    static const unsigned shared[] = {INT8_SHARED_WIDE, INT8_SHARED_NARROW, INT8_SHARED_TURING};
    void *const *kernels = gpu.int8_product[in_bfloat16(kernel->op)];
    const int kind = kernel->kind ? (int)kernel->kind - 1 : kernel_for(kernels);
    Operands of = {at[ROWS], at[WEIGHT], at[ROW_SCALES], at[WEIGHT_SCALES], inputs[BIAS] ? at[BIAS] : 0, to};
    Size size = {(int)rows, (int)n, (int)k};
    void *arguments[] = {&of, &size};
    const Launch config = {{(unsigned)tiles_of(rows, n, widths[kind]), 1, 1}, {threads[kind], 1, 1}, shared[kind], stream, 0, 0};
    const char *why = launch(kernels[kind], config, arguments);
    return why ? failure(api, title, why) : 0;
}

static int input_type(const Op *op, size_t i) {
    return i == BIAS ? in_bfloat16(op) ? BFLOAT16 : FLOAT16 : i % 2 ? FLOAT : INT8;
}
static size_t input_count(const Op *op) { return (void)op, INPUTS; }
static int input_is(const Op *op, size_t i) { return (void)op, i == BIAS ? OPTIONAL : REQUIRED; }
static int output_type(const Op *op, size_t i) { return (void)i, in_bfloat16(op) ? BFLOAT16 : FLOAT16; }

#define PRODUCT OP(name, input_type, input_count, input_is, output_type, one_tensor, required)
const Op int8_product[2] = {PRODUCT, PRODUCT};
