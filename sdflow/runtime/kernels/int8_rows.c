/* sdflow.Int8Rows, Int8RowsBfloat16: what int8 products read of their activations: rows as int8, with a scale for each.
 *
 * input: x (..., C) float16, or bfloat16. attribute: rotation: how many channels at a time are multiplied by a Hadamard matrix before
 * that, 0: none; else 16, 32, 64, 128 or 256, of which C is a multiple. outputs: the rows (..., C) int8; their scales, float32, one for
 * each row.
 */
#include "ort.h"

/* As in int8_rows.cu. */
typedef struct {
    int rows, lanes, warps, rotation;
} Rows;

typedef struct {
    Api api;
    const Op *op;
    int64_t rotation;
} Kernel;

static const char *name(const Op *op) { return op == &int8_rows[0] ? "Int8Rows" : "Int8RowsBfloat16"; }

static Status *create(const void *given, Api api, const void *info, void **result) {
    const Op *op = given;
    const char *why = load_kernels(PART_int8);
    if (!why && !gpu.int8_rows[op != &int8_rows[0]]) why = TOO_OLD_FOR_BFLOAT16;
    if (why) return failure(api, name(op), why);
    Kernel kernel = {.api = api, .op = op};
    TRY(INT_ATTRIBUTE(api)(info, "rotation", &kernel.rotation));
    const int64_t size = kernel.rotation;
    if (size && (size < 16 || size > 256 || size & (size - 1))) return failure(api, name(op), "not for this rotation");
    return keep(api, name(op), &kernel, sizeof kernel, result);
}

static Status *compute(void *op_kernel, void *context) {
    Kernel *kernel = op_kernel;
    Api api = kernel->api;
    const void *x;
    void *from, *to, *scales, *stream;
    int64_t dims[MOST_AXES], count = 1;
    size_t rank = 0;
    TRY(input(api, context, 0, &x, &from));
    TRY(shape_of(api, x, dims, &rank));
    const int64_t channels = rank ? dims[rank - 1] : 0, unit = kernel->rotation ? kernel->rotation : VECTOR;
    if (!rank || channels % unit || channels > (int64_t)2 * INT8_WARPS * INT8_HELD * 32 * VECTOR)
        return failure(api, name(kernel->op), "not for this number of channels");
    for (size_t i = 0; i + 1 < rank; ++i) count *= dims[i];
    TRY(output(api, context, 0, dims, rank, &to));
    TRY(output(api, context, 1, &count, 1, &scales));
    TRY(GPU_STREAM(api)(context, &stream));
    Rows all = {(int)count, (int)channels / VECTOR, 1, (int)kernel->rotation};
    if (!all.rows || !all.lanes) return 0;
    while (all.warps * INT8_HELD * 32 < all.lanes) all.warps *= 2;
    void *arguments[] = {&from, &to, &scales, &all};
    const int warps = all.warps > INT8_WARPS ? all.warps : INT8_WARPS;
    const Launch config = {{ceil_div(all.rows, warps / all.warps), 1, 1}, {32, warps, 1}, 0, stream, 0, 0};
    const char *why = launch(gpu.int8_rows[kernel->op != &int8_rows[0]], config, arguments);
    return why ? failure(api, name(kernel->op), why) : 0;
}

static int input_type(const Op *op, size_t i) { return (void)i, op == &int8_rows[0] ? FLOAT16 : BFLOAT16; }
static int output_type(const Op *op, size_t i) { return (void)op, i ? FLOAT : INT8; }
static size_t output_count(const Op *op) { return (void)op, 2; }

#define ROWS OP(name, input_type, one_tensor, required, output_type, output_count, required)
const Op int8_rows[2] = {ROWS, ROWS};
