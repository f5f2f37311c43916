/* The kernels of float8_product.cu, on compute capability 9.0 alone.
 *
 * sdflow.Float8GatedProduct: Float8Product and BiasSplitGelu of its result. inputs: as of Float8Product, of N columns; bias (N)
 * float16. output: (..., N / 2) float16.
 */
#include "ort.h"

#define LARGEST (1 << 24)

/* As in float8_product.cu. */
typedef struct {
    int rows, columns, depth;
} Size;

/* Of y; width: columns of one. */
static int64_t tiles_of(int64_t rows, int64_t columns, int width) {
    return (rows + FLOAT8_ROWS - 1) / FLOAT8_ROWS * ((columns + width - 1) / width);
}

/* Measured on an H200 (benchmarks/gpu/RESULTS.md, "Products in float8"): where the tiles leave few multiprocessors without one, and the
 * products are short: of long ones cuBLASLt's tiles are the quicker. */
int float8_tiles_suit(int64_t rows, int64_t n, int64_t k) {
    if (!gpu.float8_product[0] || rows > LARGEST || n > LARGEST || k > LARGEST) return 0;
    const int64_t tiles = tiles_of(rows, n, FLOAT8_COLUMNS), rounds = (tiles + gpu.processors - 1) / gpu.processors;
    return rounds * k <= FLOAT8_MOST_DEPTH && tiles * 10 >= rounds * gpu.processors * FLOAT8_LEAST_FILLED;
}

static int describe(MatrixMap *map, const void *at, int64_t rows, int64_t k, unsigned box_rows) {
    return map_matrix(map, TENSOR_MAP_UINT8, at, rows, k, box_rows, L2_PROMOTION_NONE);
}

/* gates: columns of the weight beside those of the result, each with a bias. */
static const char *multiply(const Float8Operands *of, int64_t rows, int64_t columns, int64_t gates, int64_t k, void *stream) {
    const int halves = gates ? 2 : 1;
    const int64_t tiles = tiles_of(rows, columns, FLOAT8_COLUMNS / halves);
    const unsigned blocks = (unsigned)(tiles < gpu.processors ? tiles : gpu.processors);
    MatrixMap row_map, weight_map;
    if (describe(&row_map, of->rows, rows, k, FLOAT8_ROWS) ||
        describe(&weight_map, of->weight, columns + gates, k, FLOAT8_COLUMNS / halves))
        return "the driver does not describe the matrices";
    Float8Operands all = *of;
    Size size = {(int)rows, (int)columns, (int)k};
    const Launch config = {{blocks, 1, 1}, {384, 1, 1}, FLOAT8_SHARED, stream, 0, 0};
    void *plain[] = {&row_map, &weight_map, &all.row_scales, &all.weight_scales, &all.to, &size};
    void *gated[] = {&row_map, &weight_map, &all.row_scales, &all.weight_scales, &all.bias, &all.to, &size};
    return launch(gpu.float8_product[gates ? 4 : 2 * FLOAT8_IN_TURNS + of->bfloat16], config, gates ? gated : plain);
}

const char *multiply_float8_tiles(const Float8Operands *of, int64_t rows, int64_t n, int64_t k, void *stream) {
    return multiply(of, rows, n, 0, k, stream);
}

enum { ROWS, ROW_SCALES, WEIGHT, WEIGHT_SCALES, BIAS, INPUTS };

Status *read_float8_operands(Api api, const void *context, const char *name, int gates, Float8Operands *of, Float8Sizes *sizes) {
    const void *inputs[INPUTS];
    void *at[INPUTS] = {0};
    int64_t weight_dims[MOST_AXES], row_scales, scales, biases = 0;
    size_t weight_rank = 0;
    for (size_t i = 0; i < (gates ? INPUTS : BIAS); ++i) {
        TRY(input(api, context, i, &inputs[i], &at[i]));
    }
    TRY(shape_of(api, inputs[ROWS], sizes->dims, &sizes->rank));
    TRY(shape_of(api, inputs[WEIGHT], weight_dims, &weight_rank));
    TRY(elements_of(api, inputs[ROW_SCALES], &row_scales));
    TRY(elements_of(api, inputs[WEIGHT_SCALES], &scales));
    if (gates) TRY(elements_of(api, inputs[BIAS], &biases));
    if (!sizes->rank || weight_rank != 2 || weight_dims[1] != sizes->dims[sizes->rank - 1] || (gates && biases != weight_dims[0]))
        return failure(api, name, "weight and bias are not of the rows' size");
    sizes->n = weight_dims[0], sizes->k = weight_dims[1], sizes->rows = 1;
    for (size_t i = 0; i + 1 < sizes->rank; ++i) sizes->rows *= sizes->dims[i];
    if (!sizes->k || sizes->k % 16 || !sizes->n || sizes->n % 16) return failure(api, name, "not for matrices of these sizes");
    if (row_scales != sizes->rows || scales != sizes->n)
        return failure(api, name, "there is not a scale for each row and each column");
    *of = (Float8Operands){at[ROWS], at[ROW_SCALES], at[WEIGHT], at[WEIGHT_SCALES], at[BIAS], 0, 0};
    return 0;
}

static Status *create(const void *op, Api api, const void *info, void **result) {
    (void)op, (void)info;
    const char *why = load_kernels(PART_float8);
    if (!why && !gpu.float8_product[4]) why = "it is for GPUs of compute capability 9.0";
    if (why) return failure(api, "Float8GatedProduct cannot run", why);
    return keep(api, "Float8GatedProduct", &api, sizeof api, result);
}

static Status *compute(void *op_kernel, void *context) {
    Api api = *(Api *)op_kernel;
    Float8Operands of;
    Float8Sizes sizes;
    void *stream;
    TRY(read_float8_operands(api, context, "Float8GatedProduct", 1, &of, &sizes));
    if (sizes.rows > LARGEST || sizes.n > LARGEST || sizes.k > LARGEST)
        return failure(api, "Float8GatedProduct: not for matrices of these sizes", 0);
    const int64_t columns = sizes.n / 2;
    sizes.dims[sizes.rank - 1] = columns;
    TRY(output(api, context, 0, sizes.dims, sizes.rank, &of.to));
    TRY(GPU_STREAM(api)(context, &stream));
    if (!sizes.rows) return 0;
    const char *why = multiply(&of, sizes.rows, columns, columns, sizes.k, stream);
    return why ? failure(api, "Float8GatedProduct cannot be launched", why) : 0;
}

static const char *name(const Op *op) { return (void)op, "Float8GatedProduct"; }
static int input_type(const Op *op, size_t i) { return (void)op, i == BIAS ? FLOAT16 : i == ROWS || i == WEIGHT ? UINT8 : FLOAT; }
static size_t input_count(const Op *op) { return (void)op, INPUTS; }

const Op float8_gated_product = OP(name, input_type, input_count, required, float16, one_tensor, required);
