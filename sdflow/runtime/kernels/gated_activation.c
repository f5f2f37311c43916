/* sdflow.SiluGated  y = silu(a + a_bias) * (b + b_bias)
 * sdflow.TanhGelu   y = gelu(a + a_bias), the GELU by tanh
 *
 * Each for float16, and with a name that ends in Bfloat16 for that; all inputs and the output are of that type. Float8SiluGated and
 * Float8TanhGelu give their rows as E4M3, uint8, and the rows' scales, float32, as a second output.
 *
 * inputs: a (..., W); b (..., W2), of SiluGated alone; optional a_bias, b_bias (C) and before (..., P). output: (..., P + C),
 * `before` and y side by side. Of a's rows C channels are read from the attribute a on, of b's from the attribute b on; C is the
 * attribute channels.
 */
#include "ort.h"

enum { A, B, A_BIAS, B_BIAS, BEFORE, INPUTS };

/* As in gated_activation.cu. */
typedef struct {
    const void *a, *b, *a_bias, *b_bias, *before;
    void *y, *scales;
    int a_step, b_step, rows, lanes, before_lanes;
} Activation;

typedef struct {
    Api api;
    const Op *op;
    int64_t a, b, channels;
} Kernel;

static int is_float8(const Op *op) { return op >= float8_activations && op < float8_activations + 4; }
static int place_of(const Op *op) { return (int)(op - (is_float8(op) ? float8_activations : gated_activations)); }

static const char *name(const Op *op) {
    static const char *const names[2][4] = {
        {"TanhGelu", "TanhGeluBfloat16", "SiluGated", "SiluGatedBfloat16"},
        {"Float8TanhGelu", "Float8TanhGeluBfloat16", "Float8SiluGated", "Float8SiluGatedBfloat16"},
    };
    return names[is_float8(op)][place_of(op)];
}

static Status *create(const void *given, Api api, const void *info, void **result) {
    const Op *op = given;
    const char *why = load_kernels(PART_gated_activation);
    if (!why && is_float8(op) && !gpu.float8_activation[0]) why = TOO_OLD_FOR_FLOAT8;
    if (why) return failure(api, name(op), why);
    Kernel kernel = {.api = api, .op = op};
    TRY(INT_ATTRIBUTE(api)(info, "channels", &kernel.channels));
    TRY(INT_ATTRIBUTE(api)(info, "a", &kernel.a));
    TRY(INT_ATTRIBUTE(api)(info, "b", &kernel.b));
    return keep(api, name(op), &kernel, sizeof kernel, result);
}

/* The first vector that is read of an input of `rows` rows, and how far rows lie apart. channels: that are read of each. */
static Status *columns(const Kernel *kernel, const void *value, int64_t first, int64_t channels, int64_t rows, const void **at,
                       int *step) {
    Api api = kernel->api;
    int64_t dims[MOST_AXES], elements;
    size_t rank = 0;
    void *start;
    TRY(shape_of(api, value, dims, &rank));
    TRY(elements_of(api, value, &elements));
    TRY(data(api, value, &start));
    const int64_t width = rank ? dims[rank - 1] : 0;
    if (first < 0 || first % VECTOR || width % VECTOR || first + channels > width || elements != rows * width)
        return failure(api, name(kernel->op), "not for rows of this size");
    *at = (const char *)start + 2 * first, *step = (int)(width / VECTOR);
    return 0;
}

static Status *compute(void *op_kernel, void *context) {
    const Kernel *kernel = op_kernel;
    Api api = kernel->api;
    const Op *op = kernel->op;
    const int gated = place_of(op) / 2;
    const int64_t channels = kernel->channels;
    const void *inputs[INPUTS];
    void *at[INPUTS], *stream;
    int64_t dims[MOST_AXES], elements, rows = 1;
    size_t rank = 0;
    for (size_t i = 0; i < INPUTS; ++i) {
        TRY(input(api, context, i, &inputs[i], &at[i]));
        if (i != A_BIAS && i != B_BIAS) continue;
        if (inputs[i]) TRY(elements_of(api, inputs[i], &elements));
        if (inputs[i] && elements != channels) return failure(api, name(op), "a bias of another size");
    }
    if (channels < 1 || channels % VECTOR || (inputs[B] != 0) != gated || (inputs[B_BIAS] && !gated))
        return failure(api, name(op), "not for these inputs");
    TRY(shape_of(api, inputs[A], dims, &rank));
    for (size_t i = 0; i + 1 < rank; ++i) rows *= dims[i];
    Activation of = {.a_bias = at[A_BIAS], .b_bias = at[B_BIAS], .rows = (int)rows, .lanes = (int)(channels / VECTOR)};
    TRY(columns(kernel, inputs[A], kernel->a, channels, rows, &of.a, &of.a_step));
    if (gated) TRY(columns(kernel, inputs[B], kernel->b, channels, rows, &of.b, &of.b_step));
    if (inputs[BEFORE]) TRY(columns(kernel, inputs[BEFORE], 0, VECTOR, rows, &of.before, &of.before_lanes));
    const int64_t width = (int64_t)of.before_lanes + of.lanes;
    if (rows > INT32_MAX || width * VECTOR > INT32_MAX) return failure(api, name(op), "a is too large");
    dims[rank - 1] = width * VECTOR;
    TRY(output(api, context, 0, dims, rank, (void **)&of.y));
    if (is_float8(op)) {
        if (width > (int64_t)ACTIVATION_ROW_THREADS * ACTIVATION_HELD) return failure(api, name(op), "rows are too wide");
        TRY(output(api, context, 1, &rows, 1, &of.scales));
    }
    TRY(GPU_STREAM(api)(context, &stream));
    if (!rows) return 0;
    void *arguments[] = {&of};
    if (is_float8(op)) {
        const Launch config = {{of.rows, 1, 1}, {32, ceil_div((int)width, 32 * ACTIVATION_HELD), 1}, 0, stream, 0, 0};
        const char *why = launch(gpu.float8_activation[place_of(op)], config, arguments);
        return why ? failure(api, name(op), why) : 0;
    }
    /* As BiasSplitGelu: a thread has its channels' biases in registers and goes down the rows. */
    const int wide = width < ACTIVATION_THREADS ? (int)width : ACTIVATION_THREADS, deep = ACTIVATION_THREADS / wide;
    const int across = ceil_div((int)width, wide), most = ceil_div(of.rows, deep);
    int blocks = ceil_div(gpu.processors * ACTIVATION_PER_PROCESSOR, across);
    if (blocks > most) blocks = most;
    if (blocks > 65535) blocks = 65535;
    const Launch config = {{across, blocks, 1}, {wide, deep, 1}, 0, stream, 0, 0};
    const char *why = launch(gpu.gated_activation[place_of(op)], config, arguments);
    return why ? failure(api, name(op), why) : 0;
}

static int type(const Op *op, size_t i) { return (void)i, place_of(op) % 2 ? BFLOAT16 : FLOAT16; }
static size_t input_count(const Op *op) { return (void)op, INPUTS; }
static int output_type(const Op *op, size_t i) { return !is_float8(op) ? type(op, i) : i ? FLOAT : UINT8; }
static size_t output_count(const Op *op) { return is_float8(op) ? 2 : 1; }
static int input_characteristic(const Op *op, size_t i) { return (void)op, i == A ? REQUIRED : OPTIONAL; }

#define ACTIVATION OP(name, type, input_count, input_characteristic, output_type, output_count, required)
const Op gated_activations[4] = {ACTIVATION, ACTIVATION, ACTIVATION, ACTIVATION};
const Op float8_activations[4] = {ACTIVATION, ACTIVATION, ACTIVATION, ACTIVATION};
