/* sdflow.InterleavePhases, InterleavePhasesSingle: what SubpixelConv convolves to, as one image of twice the size.
 *
 * input: x (N, H + 1, W + 1, 4 C), float16 or float32. output: (N, 2 H, 2 W, C); its pixel (2 i + a, 2 j + b) is pixel
 * (i + a, j + b) of the channels' group 2 a + b.
 */
#include "ort.h"

#define MOST_ROWS 65535 /* and images: of a grid, but for its first axis */

typedef struct {
    Api api;
    int bytes; /* of a value */
} Kernel;

static Status *create(const void *op, Api api, const void *info, void **result) {
    (void)info;
    const char *why = load_kernels(PART_interleave);
    if (why) return failure(api, "InterleavePhases cannot run", why);
    const Kernel kernel = {api, op == &interleave_phases_single ? 4 : 2};
    return keep(api, "InterleavePhases", &kernel, sizeof kernel, result);
}

static Status *compute(void *op_kernel, void *context) {
    const Kernel *kernel = op_kernel;
    Api api = kernel->api;
    const void *x;
    void *from, *to, *stream;
    int64_t dims[MOST_AXES];
    size_t rank = 0;
    TRY(input(api, context, 0, &x, &from));
    TRY(shape_of(api, x, dims, &rank));
    const int vector = 16 / kernel->bytes;
    if (rank != 4 || dims[1] < 2 || dims[2] < 2 || dims[3] % (4 * vector))
        return failure(api, "InterleavePhases: not for this shape", 0);
    if (dims[0] > MOST_ROWS || dims[1] > MOST_ROWS || dims[2] * dims[3] > INT32_MAX)
        return failure(api, "InterleavePhases: x is too large", 0);
    const int images = (int)dims[0], rows = (int)dims[1] - 1;
    int columns = (int)dims[2] - 1, lanes = (int)dims[3] / 4 / vector;
    const int64_t larger[] = {images, 2 * rows, 2 * columns, dims[3] / 4};
    TRY(output(api, context, 0, larger, 4, &to));
    TRY(GPU_STREAM(api)(context, &stream));
    if (!images || !lanes) return 0;
    void *arguments[] = {&from, &to, &columns, &lanes};
    const unsigned across = ceil_div(columns * lanes, INTERLEAVE_THREADS);
    const Launch config = {{across, rows, images}, {INTERLEAVE_THREADS, 1, 1}, 0, stream, 0, 0};
    const char *why = launch(gpu.interleave, config, arguments);
    return why ? failure(api, "InterleavePhases cannot be launched", why) : 0;
}

static const char *name(const Op *op) {
    return op == &interleave_phases_single ? "InterleavePhasesSingle" : "InterleavePhases";
}
static int type(const Op *op, size_t i) { return (void)i, op == &interleave_phases_single ? FLOAT : FLOAT16; }

#define INTERLEAVE OP(name, type, one_tensor, required, type, one_tensor, required)
const Op interleave_phases = INTERLEAVE, interleave_phases_single = INTERLEAVE;
