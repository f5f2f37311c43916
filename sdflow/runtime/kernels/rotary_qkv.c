/* sdflow.RotaryQkv, RotaryQkvBfloat16: query, key and value of an attention, of the products that give them.
 *
 * inputs, all float16 or all bfloat16, for N heads of size H:
 *     0 to 2        products of the first stream that query, key and value are columns of, (B, S, any)
 *     3 to 5        their biases (N H), each or none
 *     6, 7          weights (H) of the RMS norms of the heads of query and key, both or none
 *     8 to 15       the same of the second stream, whose tokens come behind the first one's; or none
 *     16, 17        cosines and sines, S H or B S H values for the S tokens of both streams; or none
 * Without a product for value there is none.
 * attributes: num_heads, head_size, epsilon; columns 0 to 5: the first column of each product that is read, those of the first
 * stream and those of the second one.
 * outputs: query, key and value, (B, S, N H). Channels 2 i and 2 i + 1 of a head are turned, by its cosines and sines of both.
 */
#include <stdio.h>
#include "ort.h"

enum { QUERY, KEY, VALUE, PARTS };
enum { BIAS = PARTS, WEIGHT = 2 * PARTS, STREAM = 2 * PARTS + 2, COSINE = 2 * STREAM, SINE, INPUTS };
#define WIDTH 2              /* bytes of a value */
#define LARGEST_HEAD 256     /* a warp's threads, eight channels each */
#define MOST (1 << 24)       /* rows, and channels: places in vectors fit into an int */

/* As in rotary_qkv.cu. */
typedef struct {
    const void *from[PARTS], *bias[PARTS], *weight[2];
    int pitch[PARTS];
    int tokens, first;
    int blocks;
} Stream;

typedef struct {
    Stream streams[2];
    const void *cosine, *sine;
    void *to[PARTS];
    int images, tokens;
    int lanes, head, wide;
    int rows;
    int tables;
    float epsilon;
} All;

typedef struct {
    Api api;
    int bfloat16;
    int64_t heads, size, columns[2 * PARTS];
    float epsilon;
} Kernel;

static Status *create(const void *op, Api api, const void *info, void **result) {
    const char *why = load_kernels(PART_rotary_qkv);
    if (why) return failure(api, "RotaryQkv cannot run", why);
    Kernel kernel = {.api = api, .bfloat16 = op == &op_rotary_qkv_bfloat16};
    TRY(INT_ATTRIBUTE(api)(info, "num_heads", &kernel.heads));
    TRY(INT_ATTRIBUTE(api)(info, "head_size", &kernel.size));
    TRY(FLOAT_ATTRIBUTE(api)(info, "epsilon", &kernel.epsilon));
    for (int i = 0; i < 2 * PARTS; ++i) {
        char name[16];
        snprintf(name, sizeof name, "column%d", i);
        TRY(INT_ATTRIBUTE(api)(info, name, &kernel.columns[i]));
    }
    const int64_t size = kernel.size;
    if (kernel.heads < 1 || size < VECTOR || size > LARGEST_HEAD || size & (size - 1) || kernel.heads * size > MOST)
        return failure(api, "RotaryQkv: not for heads of this size", 0);
    return keep(api, "RotaryQkv", &kernel, sizeof kernel, result);
}

/* A stream's part of the inputs. images, *value: of the first stream, or those of this one where images is below zero. */
static Status *read_stream(const Kernel *kernel, void *context, int which, Stream *stream, int64_t *images, int *value) {
    Api api = kernel->api;
    const int64_t row = kernel->heads * kernel->size;
    const void *given[STREAM];
    for (int i = 0; i < STREAM; ++i) {
        void *at;
        TRY(input(api, context, which * STREAM + i, &given[i], &at));
        if (given[i] && i >= BIAS) {
            int64_t elements;
            TRY(elements_of(api, given[i], &elements));
            if (elements != (i < WEIGHT ? row : kernel->size))
                return failure(api, "RotaryQkv: a bias or a weight is of another size", 0);
        }
        if (i < BIAS) stream->from[i] = at;
        else if (i < WEIGHT) stream->bias[i - BIAS] = at;
        else stream->weight[i - WEIGHT] = at;
    }
    if (*images < 0) *value = !!given[VALUE];
    if (!given[QUERY] || !given[KEY] || *value != !!given[VALUE] || !given[WEIGHT] != !given[WEIGHT + 1])
        return failure(api, "RotaryQkv: a product or a weight is missing", 0);
    for (int i = 0; i < PARTS; ++i) {
        int64_t dims[MOST_AXES];
        size_t rank = 0;
        const int64_t column = kernel->columns[which * PARTS + i];
        if (!given[i]) continue;
        TRY(shape_of(api, given[i], dims, &rank));
        if (rank == 3 && *images < 0) *images = dims[0];
        if (rank == 3 && !i) stream->tokens = (int)dims[1];
        if (rank != 3 || dims[0] != *images || dims[1] != stream->tokens || column < 0 || column + row > dims[2] ||
            column % VECTOR || dims[2] % VECTOR)
            return failure(api, "RotaryQkv: the products do not fit together", 0);
        if (dims[0] * dims[1] > MOST || dims[2] > MOST) return failure(api, "RotaryQkv: a product is too large", 0);
        stream->from[i] = (const char *)stream->from[i] + column * WIDTH;
        stream->pitch[i] = (int)dims[2] / VECTOR;
    }
    return 0;
}

static Status *read_tables(Api api, void *context, int64_t size, All *all) {
    const void *tables[2];
    void *at[2];
    int64_t elements[2] = {0, 0};
    for (int i = 0; i < 2; ++i) {
        TRY(input(api, context, COSINE + i, &tables[i], &at[i]));
        if (tables[i]) TRY(elements_of(api, tables[i], &elements[i]));
    }
    const int64_t shared = all->tokens * size;
    if (!tables[0] && !tables[1]) return 0;
    if (elements[0] != elements[1] || (elements[0] != shared && elements[0] != all->images * shared))
        return failure(api, "RotaryQkv: cosines and sines are not those of the tokens", 0);
    all->cosine = at[0];
    all->sine = at[1];
    all->tables = elements[0] == shared ? 0 : all->tokens;
    return 0;
}

/* Each thread keeps its channels' bias and weight and goes down several rows, and all blocks run at once. */
static Status *run(const Kernel *kernel, All *all, int parts, void *stream) {
    all->head = (int)kernel->size / VECTOR;
    all->lanes = (int)kernel->heads * all->head;
    all->epsilon = kernel->epsilon;
    const int columns = ceil_div(all->lanes, ROTARY_THREADS);
    all->wide = round_up(ceil_div(all->lanes, columns), all->head);
    const int deep = ROTARY_THREADS / all->wide, threads = round_up(deep * all->wide, 32);
    const int rows[2] = {all->images * all->streams[0].tokens, all->images * all->streams[1].tokens};
    int most = gpu.processors * (ROTARY_PER_PROCESSOR * ROTARY_THREADS / threads) / (columns * parts);
    if (most < 2) most = 2; /* one for each stream */
    all->rows = round_up(ceil_div(rows[0] + rows[1], most), deep);
    while (ceil_div(rows[0], all->rows) + ceil_div(rows[1], all->rows) > most) all->rows += deep;
    for (int i = 0; i < 2; ++i) all->streams[i].blocks = ceil_div(rows[i], all->rows);
    void *arguments[] = {all};
    const unsigned blocks = all->streams[0].blocks + all->streams[1].blocks;
    const Launch config = {{columns, blocks, parts}, {threads, 1, 1}, 0, stream, 0, 0};
    const char *why = launch(kernel->bfloat16 ? gpu.rotary_qkv[1] : gpu.rotary_qkv[0], config, arguments);
    return why ? failure(kernel->api, "RotaryQkv cannot be launched", why) : 0;
}

static Status *compute(void *op_kernel, void *context) {
    const Kernel *kernel = op_kernel;
    Api api = kernel->api;
    All all = {.images = 0};
    const void *other;
    void *stream, *at;
    int64_t images = -1;
    int value = 0;
    TRY(read_stream(kernel, context, 0, &all.streams[0], &images, &value));
    TRY(input(api, context, STREAM, &other, &at));
    if (other) TRY(read_stream(kernel, context, 1, &all.streams[1], &images, &value));
    all.images = (int)images;
    all.tokens = all.streams[0].tokens + all.streams[1].tokens;
    all.streams[1].first = all.streams[0].tokens;
    if ((int64_t)all.images * all.tokens > MOST) return failure(api, "RotaryQkv: a product is too large", 0);
    TRY(read_tables(api, context, kernel->size, &all));
    const int64_t result[3] = {images, all.tokens, kernel->heads * kernel->size};
    for (int i = 0; i < PARTS - !value; ++i) {
        TRY(output(api, context, i, result, 3, &all.to[i]));
    }
    TRY(GPU_STREAM(api)(context, &stream));
    return all.images && all.tokens ? run(kernel, &all, PARTS - !value, stream) : 0;
}

static const char *name(const Op *op) { return op == &op_rotary_qkv ? "RotaryQkv" : "RotaryQkvBfloat16"; }
static int type(const Op *op, size_t i) { return (void)i, op == &op_rotary_qkv ? FLOAT16 : BFLOAT16; }
static size_t input_count(const Op *op) { return (void)op, INPUTS; }
static size_t output_count(const Op *op) { return (void)op, PARTS; }
static int characteristic(const Op *op, size_t i) { return (void)op, i < VALUE ? REQUIRED : OPTIONAL; }

#define ROTARY OP(name, type, input_count, characteristic, type, output_count, characteristic)
const Op op_rotary_qkv = ROTARY, op_rotary_qkv_bfloat16 = ROTARY;
