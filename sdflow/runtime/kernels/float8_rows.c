/* What float8 products read of their activations: rows as E4M3, with a scale for each.
 *
 * sdflow.Float8Rows           x (..., C); Float8RowsBfloat16 for bfloat16. Attributes: tokens, first: of x (N, T, C) so many of the T
 *                             rows of each image, from the first one on; tokens 0: all rows.
 * sdflow.Float8SplitGelu      x (..., 2 C), bias (2 C): BiasSplitGelu
 * sdflow.Float8LayerNorm      x, skip (..., C), gamma, beta, bias (C): the layer normalization of x + skip + bias. Attribute:
 *                             epsilon.
 *
 * All other inputs are float16. outputs: the rows (..., C), uint8; their scales, float32, one for each row; of Float8LayerNorm, if it
 * is wanted, x + skip + bias. What the operator stands for is about the rows times their scales.
 */
#include "ort.h"

#define MOST_INPUTS 5

/* As in float8_rows.cu. */
typedef struct {
    int rows, lanes, warps, tokens, whole, first;
} Rows;

typedef struct {
    Api api;
    const Op *op;
    float epsilon;
    int64_t tokens, first;
} Kernel;

static int is_plain(const Op *op) { return op == &float8_rows || op == &float8_rows_bfloat16; }

static const char *name(const Op *op) {
    if (is_plain(op)) return op == &float8_rows ? "Float8Rows" : "Float8RowsBfloat16";
    return op == &float8_split_gelu ? "Float8SplitGelu" : "Float8LayerNorm";
}
static size_t input_count(const Op *op) { return is_plain(op) ? 1 : op == &float8_split_gelu ? 2 : MOST_INPUTS; }
static size_t output_count(const Op *op) { return op == &float8_layer_norm ? 3 : 2; }

static Status *create(const void *given, Api api, const void *info, void **result) {
    const Op *op = given;
    const char *why = load_kernels(PART_float8);
    if (!why && !gpu.float8_rows[0]) why = TOO_OLD_FOR_FLOAT8;
    if (why) return failure(api, name(op), why);
    Kernel kernel = {.api = api, .op = op};
    if (op == &float8_layer_norm) TRY(FLOAT_ATTRIBUTE(api)(info, "epsilon", &kernel.epsilon));
    if (is_plain(op)) TRY(INT_ATTRIBUTE(api)(info, "tokens", &kernel.tokens));
    if (is_plain(op)) TRY(INT_ATTRIBUTE(api)(info, "first", &kernel.first));
    return keep(api, name(op), &kernel, sizeof kernel, result);
}

static Status *compute(void *op_kernel, void *context) {
    Kernel *kernel = op_kernel;
    Api api = kernel->api;
    const Op *op = kernel->op;
    const void *inputs[MOST_INPUTS];
    void *at[MOST_INPUTS], *to, *scales, *sum = 0, *stream;
    int64_t dims[MOST_AXES], elements, count = 1;
    size_t rank = 0, outputs = 0;
    for (size_t i = 0; i < input_count(op); ++i) {
        TRY(input(api, context, i, &inputs[i], &at[i]));
    }
    TRY(shape_of(api, inputs[0], dims, &rank));
    const int unit = op == &float8_split_gelu ? 2 : 1;
    const int most_warps = FLOAT8_WARPS * (is_plain(op) ? 2 : 1);
    if (!rank || dims[rank - 1] % (unit * VECTOR) || dims[rank - 1] > (int64_t)unit * most_warps * FLOAT8_HELD * 32 * VECTOR)
        return failure(api, name(op), "not for this number of channels");
    const int64_t tokens = kernel->tokens, first = kernel->first, whole = rank > 1 ? dims[rank - 2] : 1;
    if (tokens && (rank != 3 || tokens < 0 || first < 0 || first + tokens > whole))
        return failure(api, name(op), "not for these rows of each image");
    if (tokens) dims[1] = tokens;
    for (size_t i = 0; i + 1 < rank; ++i) count *= dims[i];
    for (size_t i = 1; i < input_count(op); ++i) {
        TRY(elements_of(api, inputs[i], &elements));
        const int whole = op == &float8_layer_norm && i == 1;
        if (elements != (whole ? count : 1) * dims[rank - 1]) return failure(api, name(op), "inputs of other sizes than x");
    }
    dims[rank - 1] /= unit;
    TRY(output(api, context, 0, dims, rank, &to));
    TRY(output(api, context, 1, &count, 1, &scales));
    TRY(OUTPUT_COUNT(api)(context, &outputs));
    if (outputs > 2) TRY(output(api, context, 2, dims, rank, &sum));
    TRY(GPU_STREAM(api)(context, &stream));
    Rows all = {(int)count, (int)dims[rank - 1] / VECTOR, 1, (int)(tokens ? tokens : count), (int)whole, (int)first};
    if (!all.rows || !all.lanes) return 0;
    while (all.warps * FLOAT8_HELD * 32 < all.lanes) all.warps *= 2;
    void *rows[] = {&at[0], &to, &scales, &all}, *split[] = {&at[0], &at[1], &to, &scales, &all};
    void *norm[] = {&at[0], &at[1], &at[2], &at[3], &at[4], &to, &scales, &sum, &all, &kernel->epsilon};
    void *function = gpu.float8_rows[op == &float8_rows ? 0 : op == &float8_split_gelu ? 1 : op == &float8_layer_norm ? 2 : 3];
    void **arguments = is_plain(op) ? rows : op == &float8_split_gelu ? split : norm;
    const int warps = all.warps > FLOAT8_WARPS ? all.warps : FLOAT8_WARPS;
    const Launch config = {{ceil_div(all.rows, warps / all.warps), 1, 1}, {32, warps, 1}, 0, stream, 0, 0};
    const char *why = launch(function, config, arguments);
    return why ? failure(api, name(op), why) : 0;
}

static int input_type(const Op *op, size_t i) { return (void)i, op == &float8_rows_bfloat16 ? BFLOAT16 : FLOAT16; }
static int output_type(const Op *op, size_t i) { return (void)op, i == 0 ? UINT8 : i == 1 ? FLOAT : FLOAT16; }
static int output_characteristic(const Op *op, size_t i) { return (void)op, i < 2 ? REQUIRED : OPTIONAL; }

#define ROWS OP(name, input_type, input_count, required, output_type, output_count, output_characteristic)
const Op float8_rows = ROWS, float8_rows_bfloat16 = ROWS, float8_split_gelu = ROWS, float8_layer_norm = ROWS;
