/* sdflow.GroupNorm, and sdflow.GroupNormSingle for float32: GroupNorm and SkipGroupNorm of com.microsoft.
 *
 * inputs: x (N, H, W, C) float16; gamma (C), beta (C) float32; optional skip, as x or (N, C) or (N, 1, 1, C), and bias
 * (C), of x's type. outputs: y as x; scratch for the sums; optional x + skip + bias. attributes: groups, epsilon, activation
 * (1: SiLU).
 */
#include "ort.h"

#define MAX_GROUPS 32
#define MAX_IMAGES 65535 /* of a grid, in its second and third direction */
#define MAX_SIDE 32768   /* positions are counted in int */

/* As in group_norm_twice.cu. */
typedef struct {
    int rows, lanes, channels_per_group, groups, rows_per_block, skip_rows;
} Layout;

/* As in group_norm_held.cu. */
typedef struct {
    int rows, row_lanes, lanes, channels_per_group, groups, rows_per_block, skip_rows, silu;
    float epsilon;
} Slice;

typedef struct {
    Api api;
    float epsilon;
    int64_t groups, activation;
    int single;
} Kernel;

static Status *create(const void *op, Api api, const void *info, void **result) {
    const char *why = load_kernels(PART_group_norm);
    if (why) return failure(api, "GroupNorm: cannot run", why);
    Kernel kernel = {.api = api, .single = op == &group_norm_single};
    TRY(FLOAT_ATTRIBUTE(api)(info, "epsilon", &kernel.epsilon));
    TRY(INT_ATTRIBUTE(api)(info, "groups", &kernel.groups));
    TRY(INT_ATTRIBUTE(api)(info, "activation", &kernel.activation));
    if (kernel.groups < 1 || kernel.groups > MAX_GROUPS) return failure(api, "GroupNorm: 1 to 32 groups, please", 0);
    return keep(api, "GroupNorm", &kernel, sizeof kernel, result);
}

enum { X, GAMMA, BETA, SKIP, BIAS, INPUTS };

/* What is to be done. rows: positions of an image; skip_rows: 0 without, 1 when it holds for all positions. */
typedef struct {
    const Kernel *kernel;
    void *context, *stream, *at[INPUTS], *y, *sum;
    int images, rows, channels, skip_rows;
} Work;

/* How a slice of whole groups is held by a cluster of blocks. Returns 0 where images are too large. */
static int plan_held(const Work *work, Slice *slice, int *cluster, int *threads) {
    const int width = work->channels / (int)work->kernel->groups, row_lanes = work->channels / VECTOR;
    int lanes = 1; /* whole groups, whole vectors, and 64 bytes in a row if there are */
    while (lanes * VECTOR % width) ++lanes;
    while (lanes < 4 && row_lanes % (2 * lanes) == 0) lanes *= 2;
    *slice = (Slice){work->rows, row_lanes, lanes, width, lanes * VECTOR / width, 0, work->skip_rows,
                     work->kernel->activation == 1, work->kernel->epsilon};
    if (work->kernel->single || !gpu.held[0] || slice->groups > 32) return 0;
    int unit = 32; /* threads come in warps, and in rows */
    while (unit % lanes) unit += 32;
    const int slices = row_lanes / lanes, most = THREADS / unit * unit;
    if (!most) return 0;
    for (*cluster = 1;; *cluster *= 2) {
        slice->rows_per_block = ceil_div(work->rows, *cluster);
        const int64_t vectors = (int64_t)slice->rows_per_block * lanes, blocks = (int64_t)work->images * slices;
        const int more = 2 * *cluster, can_grow = more <= 8 && more * slice->groups <= 32 && more <= work->rows;
        if (can_grow && (vectors > 8 * most || blocks * more * 4 <= gpu.processors * 5)) continue;
        if (vectors > 8 * most) return 0;
        *threads = round_up(ceil_div((int)vectors, 4), unit);
        if (*threads > most) *threads = most;
        return 1;
    }
}

static Status *hold(const Work *work, Slice slice, int cluster, int threads) {
    Attribute attribute = {.id = CLUSTER_DIMENSION, .value.dimensions = {cluster, 1, 1}};
    Launch config = {{cluster, slice.row_lanes / slice.lanes, work->images}, {threads, 1, 1}, 0, work->stream, &attribute, 0};
    Work copy = *work;
    void *arguments[] = {&copy.at[X], &copy.at[SKIP], &copy.at[BIAS], &copy.at[GAMMA], &copy.at[BETA], &copy.y, &copy.sum,
                         &slice};
    void *function = slice.rows_per_block <= 4 * (threads / slice.lanes) ? gpu.held[0] : gpu.held[1];
    const char *why = launch(function, config, arguments);
    return why ? failure(work->kernel->api, "GroupNorm: the kernel cannot be launched", why) : 0;
}

/* As many blocks for an image as keep all multiprocessors busy, each with at least one row for each of its threads. */
static int rows_per_block(const Work *work, int step, int per_processor) {
    const int wanted = ceil_div(gpu.processors * per_processor, work->images), most = ceil_div(work->rows, step);
    return ceil_div(work->rows, wanted < most ? wanted : most);
}

static Status *sum_and_apply(const Work *work) {
    Work from = *work;
    Api api = work->kernel->api;
    const int lanes = work->channels / VECTOR, groups = (int)work->kernel->groups;
    const int step = THREADS / lanes, threads = round_up(lanes * step, 32);
    Layout layout = {work->rows, lanes, work->channels / groups, groups, rows_per_block(work, step, SUMS_PER_PROCESSOR),
                     work->skip_rows};
    int parts = ceil_div(work->rows, layout.rows_per_block), silu = work->kernel->activation == 1;
    float epsilon = work->kernel->epsilon;
    const int64_t scratch_dims[4] = {work->images, parts, groups, 2};
    void *scratch;
    TRY(output(api, work->context, 1, scratch_dims, 4, &scratch));

    void *sums_arguments[] = {&from.at[X], &from.at[SKIP], &from.at[BIAS], &from.sum, &scratch, &layout};
    Launch config = {{parts, work->images, 1}, {threads, 1, 1}, 0, work->stream, 0, 0};
    const char *why = launch(work->kernel->single ? gpu.sums[1] : gpu.sums[0], config, sums_arguments);
    if (why) return failure(api, "GroupNorm: the kernel of the sums cannot be launched", why);

    if (work->sum) {
        from.at[X] = work->sum;
        from.at[SKIP] = from.at[BIAS] = 0;
        layout.skip_rows = 0;
    }
    layout.rows_per_block = rows_per_block(work, step, APPLY_PER_PROCESSOR);
    config.grid[0] = ceil_div(work->rows, layout.rows_per_block);
    void *arguments[] = {&from.at[X], &from.at[SKIP], &from.at[BIAS], &from.at[GAMMA], &from.at[BETA], &scratch, &from.y,
                         &layout, &parts, &epsilon, &silu};
    why = launch(work->kernel->single ? gpu.apply[1] : gpu.apply[0], config, arguments);
    return why ? failure(api, "GroupNorm: the kernel that normalizes cannot be launched", why) : 0;
}

static Status *compute(void *op_kernel, void *context) {
    const Kernel *kernel = op_kernel;
    Api api = kernel->api;
    Work work = {.kernel = kernel, .context = context};
    const void *inputs[INPUTS];
    void *value;
    int64_t dims[MOST_AXES], skip_dims[MOST_AXES];
    size_t rank = 0, skip_rank = 0, outputs = 0;
    for (size_t i = 0; i < INPUTS; ++i) {
        TRY(input(api, context, i, &inputs[i], &work.at[i]));
    }
    TRY(shape_of(api, inputs[X], dims, &rank));
    if (rank != 4) return failure(api, "GroupNorm: x must have four axes", 0);
    if (dims[0] > MAX_IMAGES || dims[1] > MAX_SIDE || dims[2] > MAX_SIDE)
        return failure(api, "GroupNorm: x is too large", 0);
    work.images = (int)dims[0], work.rows = (int)(dims[1] * dims[2]), work.channels = (int)dims[3];
    const int width = work.channels / (int)kernel->groups;
    if (work.channels % VECTOR || work.channels % kernel->groups || work.channels / VECTOR > THREADS ||
        (width < VECTOR && width != 4))
        return failure(api, "GroupNorm: not for this number of channels", 0);
    if (inputs[SKIP]) {
        TRY(shape_of(api, inputs[SKIP], skip_dims, &skip_rank));
        int64_t elements = 1;
        for (size_t i = 0; i < skip_rank; ++i) elements *= skip_dims[i];
        if (elements == (int64_t)work.images * work.rows * work.channels) work.skip_rows = work.rows;
        else if (elements == (int64_t)work.images * work.channels) work.skip_rows = 1;
        else return failure(api, "GroupNorm: skip has another shape than x", 0);
    }
    TRY(output(api, context, 0, dims, 4, &work.y));
    TRY(OUTPUT_COUNT(api)(context, &outputs));
    if (outputs > 2) TRY(output(api, context, 2, dims, 4, &work.sum));
    TRY(GPU_STREAM(api)(context, &work.stream));
    const int64_t nothing = 0;
    if (work.images == 0 || work.rows == 0) return OUTPUT(api)(context, 1, &nothing, 1, &value);
    Slice slice;
    int cluster, threads;
    if (!plan_held(&work, &slice, &cluster, &threads)) return sum_and_apply(&work);
    TRY(OUTPUT(api)(context, 1, &nothing, 1, &value));
    return hold(&work, slice, cluster, threads);
}

static const char *name(const Op *op) { return op == &group_norm_single ? "GroupNormSingle" : "GroupNorm"; }
static int own_type(const Op *op) { return op == &group_norm_single ? FLOAT : FLOAT16; }
static int input_type(const Op *op, size_t i) { return i == GAMMA || i == BETA ? FLOAT : own_type(op); }
static size_t input_count(const Op *op) { return (void)op, 5; }
static int output_type(const Op *op, size_t i) { return i == 1 ? FLOAT : own_type(op); }
static size_t output_count(const Op *op) { return (void)op, 3; }
static int input_characteristic(const Op *op, size_t i) { return (void)op, i < 3 ? REQUIRED : OPTIONAL; }
static int output_characteristic(const Op *op, size_t i) { return (void)op, i < 2 ? REQUIRED : OPTIONAL; }

#define NORM OP(name, input_type, input_count, input_characteristic, output_type, output_count, output_characteristic)
const Op group_norm = NORM, group_norm_single = NORM;
