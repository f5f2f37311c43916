/* sdflow.GatedResidual      sum = x + gate * (branch + branch_bias) + gate2 * (branch2 + branch2_bias)
 * sdflow.ModulatedNorm      y, y2 = norm(x) * scale + shift, norm(x) * scale2 + shift2
 * sdflow.GatedResidualNorm  y, sum, y2: both, of the sum
 *
 * Each for float16, and with a name that ends in Bfloat16 for that; all inputs and outputs are of that type. Float8ModulatedNorm and
 * Float8GatedResidualNorm give rows of E4M3, uint8, in the place of y and of y2, each followed by its rows' scales, float32.
 *
 * inputs: x (N, ..., C) and, each optional: branch, as x; branch_bias, branch_gamma (C); gate, N rows or one; branch2, as x;
 * branch2_bias (C); gate2; gamma, beta (C); scale, shift, scale2, shift2, N rows or one. Of those rows C channels are read, from
 * the attribute of the input's name on: they may be parts of one longer row, (N, ..., W).
 *
 * attributes: norm (0: none, 1: layer normalization, 2: RMS), epsilon; branch_epsilon, of the RMS normalization that the branch
 * has where there is a branch_gamma (then there is no branch2); plus_one: 1 where y scales by 1 + scale, 2 where y2 does, 3 where
 * both do; gate, gate2, scale, shift, scale2, shift2: the first channel.
 */
#include "ort.h"

enum { X, BRANCH, BRANCH_BIAS, BRANCH_GAMMA, GATE, BRANCH2, BRANCH2_BIAS, GATE2, GAMMA, BETA, SCALE, SHIFT, SCALE2, SHIFT2, INPUTS };
enum { RESIDUAL, MODULATED, RESIDUAL_NORM, FLOAT8_MODULATED, FLOAT8_RESIDUAL_NORM };
enum { Y, SCALES, SUM, Y2, SCALES2, RESULTS };

/* By task: what the outputs are, the required ones first. */
static const struct {
    int required, count, at[RESULTS];
} outputs_of[] = {
    {1, 1, {SUM}},
    {1, 2, {Y, Y2}},
    {2, 3, {Y, SUM, Y2}},
    {2, 4, {Y, SCALES, Y2, SCALES2}},
    {3, 5, {Y, SCALES, SUM, Y2, SCALES2}},
};

/* As in residual_norm.cu. */
typedef struct {
    const void *at;
    int step;
} PerImage;

typedef struct {
    const void *at, *bias, *gamma;
    PerImage gate;
} Branch;

typedef struct {
    const void *x;
    Branch branches[2];
    const void *gamma, *beta;
    PerImage scale[2], shift[2];
    void *sum, *y[2], *scales[2];
    int rows, lanes, norm, plus_one;
    float epsilon, branch_epsilon;
} ResidualNorm;

typedef struct {
    Api api;
    const Op *op;
    int64_t norm, plus_one, first[INPUTS]; /* first: of the inputs that have a row for each image */
    float epsilon, branch_epsilon;
} Kernel;

static const char *const row_names[INPUTS] = {
    [GATE] = "gate", [GATE2] = "gate2", [SCALE] = "scale", [SHIFT] = "shift", [SCALE2] = "scale2", [SHIFT2] = "shift2",
};

static int is_float8(const Op *op) { return op >= float8_norms && op < float8_norms + 4; }
static int place_of(const Op *op) { return is_float8(op) ? 6 + (int)(op - float8_norms) : (int)(op - residual_norms); }
static int task_of(const Op *op) { return place_of(op) / 2; }
static int is_bfloat16(const Op *op) { return place_of(op) % 2; }

static const char *name(const Op *op) {
    static const char *const names[] = {"GatedResidual", "GatedResidualBfloat16", "ModulatedNorm", "ModulatedNormBfloat16",
                                        "GatedResidualNorm", "GatedResidualNormBfloat16", "Float8ModulatedNorm",
                                        "Float8ModulatedNormBfloat16", "Float8GatedResidualNorm",
                                        "Float8GatedResidualNormBfloat16"};
    return names[place_of(op)];
}

static Status *create(const void *given, Api api, const void *info, void **result) {
    const Op *op = given;
    const char *why = load_kernels(PART_residual_norm);
    if (!why && is_float8(op) && !gpu.float8_norm[0]) why = TOO_OLD_FOR_FLOAT8;
    if (why) return failure(api, name(op), why);
    Kernel kernel = {.api = api, .op = op};
    TRY(INT_ATTRIBUTE(api)(info, "norm", &kernel.norm));
    TRY(INT_ATTRIBUTE(api)(info, "plus_one", &kernel.plus_one));
    TRY(FLOAT_ATTRIBUTE(api)(info, "epsilon", &kernel.epsilon));
    TRY(FLOAT_ATTRIBUTE(api)(info, "branch_epsilon", &kernel.branch_epsilon));
    for (int i = 0; i < INPUTS; ++i)
        if (row_names[i]) TRY(INT_ATTRIBUTE(api)(info, row_names[i], &kernel.first[i]));
    return keep(api, name(op), &kernel, sizeof kernel, result);
}

/* What is to be read of an input with a row for each image, or with one for all. */
static Status *per_image(const Kernel *kernel, const void *value, int input, int64_t images, int64_t channels, PerImage *result) {
    Api api = kernel->api;
    int64_t dims[MOST_AXES], elements = 0;
    size_t rank = 0;
    void *at;
    if (!value) return 0;
    TRY(shape_of(api, value, dims, &rank));
    TRY(elements_of(api, value, &elements));
    TRY(data(api, value, &at));
    const int64_t width = rank ? dims[rank - 1] : 0, rows = width ? elements / width : 0, first = kernel->first[input];
    if (first < 0 || first % VECTOR || width % VECTOR || first + channels > width || (rows != 1 && rows != images))
        return failure(api, name(kernel->op), "an input that is not a row of channels for each image");
    *result = (PerImage){(const char *)at + 2 * first, rows == 1 ? 0 : (int)(width / VECTOR)};
    return 0;
}

static Status *compute(void *op_kernel, void *context) {
    const Kernel *kernel = op_kernel;
    Api api = kernel->api;
    const Op *op = kernel->op;
    const void *inputs[INPUTS];
    void *at[INPUTS], *stream;
    int64_t dims[MOST_AXES], elements, all = 1;
    size_t rank = 0, outputs = 0;
    for (size_t i = 0; i < INPUTS; ++i) {
        TRY(input(api, context, i, &inputs[i], &at[i]));
    }
    TRY(shape_of(api, inputs[X], dims, &rank));
    if (rank < 2 || dims[rank - 1] % VECTOR || dims[rank - 1] > (int64_t)RESIDUAL_THREADS * RESIDUAL_HELD * VECTOR)
        return failure(api, name(op), "not for this number of channels");
    for (size_t i = 0; i < rank; ++i) all *= dims[i];
    const int64_t images = rank > 2 ? dims[0] : 1, channels = dims[rank - 1];
    if (images > 65535 || all > (int64_t)INT32_MAX * VECTOR) return failure(api, name(op), "x is too large");
    for (int i = BRANCH; i < INPUTS; ++i) {
        if (!inputs[i] || row_names[i]) continue;
        TRY(elements_of(api, inputs[i], &elements));
        if (elements != (i == BRANCH || i == BRANCH2 ? all : channels)) return failure(api, name(op), "an input of another size");
    }
    if (inputs[BRANCH2] && inputs[BRANCH_GAMMA]) return failure(api, name(op), "two branches, and one with a norm");
    ResidualNorm of = {.x = at[X], .gamma = at[GAMMA], .beta = at[BETA], .lanes = (int)(channels / VECTOR)};
    of.branches[0] = (Branch){at[BRANCH], at[BRANCH_BIAS], at[BRANCH_GAMMA], {0, 0}};
    of.branches[1] = (Branch){at[BRANCH2], at[BRANCH2_BIAS], 0, {0, 0}};
    of.norm = (int)kernel->norm, of.plus_one = (int)kernel->plus_one;
    of.epsilon = kernel->epsilon, of.branch_epsilon = kernel->branch_epsilon;
    TRY(per_image(kernel, inputs[GATE], GATE, images, channels, &of.branches[0].gate));
    TRY(per_image(kernel, inputs[GATE2], GATE2, images, channels, &of.branches[1].gate));
    for (int i = 0; i < 2; ++i) {
        const int scale = i ? SCALE2 : SCALE, shift = i ? SHIFT2 : SHIFT;
        TRY(per_image(kernel, inputs[scale], scale, images, channels, &of.scale[i]));
        TRY(per_image(kernel, inputs[shift], shift, images, channels, &of.shift[i]));
    }
    void **to[RESULTS] = {&of.y[0], &of.scales[0], &of.sum, &of.y[1], &of.scales[1]};
    const int64_t every = all / channels;
    TRY(OUTPUT_COUNT(api)(context, &outputs));
    for (size_t i = 0; i < outputs; ++i) {
        const int what = outputs_of[task_of(op)].at[i], scales = what == SCALES || what == SCALES2;
        TRY(output(api, context, i, scales ? &every : dims, scales ? 1 : rank, to[what]));
    }
    TRY(GPU_STREAM(api)(context, &stream));
    if (!all) return 0;
    of.rows = (int)(all / channels / images);
    void *const *kernels = is_float8(op) ? gpu.float8_norm : gpu.residual_norm;
    void *arguments[] = {&of}, *function = kernels[2 * is_bfloat16(op) + (at[BRANCH_GAMMA] != 0)];
    const Launch config = {{of.rows, images, 1}, {32, ceil_div(of.lanes, 32 * RESIDUAL_HELD), 1}, 0, stream, 0, 0};
    const char *why = launch(function, config, arguments);
    return why ? failure(api, name(op), why) : 0;
}

static int type(const Op *op, size_t i) { return (void)i, is_bfloat16(op) ? BFLOAT16 : FLOAT16; }
static size_t input_count(const Op *op) { return (void)op, INPUTS; }
static int output_type(const Op *op, size_t i) {
    const int what = outputs_of[task_of(op)].at[i];
    if (what == SCALES || what == SCALES2) return FLOAT;
    return is_float8(op) && what != SUM ? UINT8 : type(op, i);
}
static size_t output_count(const Op *op) { return (size_t)outputs_of[task_of(op)].count; }
static int input_characteristic(const Op *op, size_t i) { return (void)op, i == X ? REQUIRED : OPTIONAL; }
static int output_characteristic(const Op *op, size_t i) {
    return (int)i < outputs_of[task_of(op)].required ? REQUIRED : OPTIONAL;
}

#define NORM OP(name, type, input_count, input_characteristic, output_type, output_count, output_characteristic)
const Op residual_norms[6] = {NORM, NORM, NORM, NORM, NORM, NORM}, float8_norms[4] = {NORM, NORM, NORM, NORM};
