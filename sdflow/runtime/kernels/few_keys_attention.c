/* sdflow.FewKeysAttention: MultiHeadAttention of com.microsoft, without a mask, where keys are few.
 *
 * inputs, all float16, with N heads of size H:
 *     query (B, S, N H), key (B, L, N H), value (B, L, N H)
 *     query (B, S, N H), key and value (B, L, N, 2, H)
 *     query, key and value (B, S, N, 3, H)
 * attributes: num_heads, scale. output: (B, S, N H), softmax(scale query key^T) value for each head.
 */
#include "ort.h"

#define HALF 2                /* bytes */
#define MOST_BLOCKS 65535     /* along a grid's second and third axis */
#define MOST_ROUNDS 4
#define MOST_ROWS (1 << 22)   /* of an image, and channels: places in vectors fit into an int */

enum { QUERY, KEY, VALUE, INPUTS };

/* As in few_keys_attention.cu. */
typedef struct {
    int queries, keys;
    int row, head;
    int key_row, key_head;
    int rounds;
    int held;
    float scale;
} Attention;

typedef struct {
    Api api;
    int64_t heads;
    float scale;
} Kernel;

enum { one, more };

static const struct {
    int size, piece, pieces, warps, tiles, buffers, blocks;
} kernels[FEW_KEYS_COUNT] = {
#define ROW(...) {__VA_ARGS__},
    FEW_KEYS_KERNELS(ROW)
};

const char *const few_keys_names[FEW_KEYS_COUNT] = {
#define NAME(SIZE, PIECE, PIECES, ...) "few_keys_attention_" #SIZE "_" #PIECE "_" #PIECES,
    FEW_KEYS_KERNELS(NAME)
};

static Status *create(const void *op, Api api, const void *info, void **result) {
    (void)op;
    const char *why = load_kernels(PART_few_keys_attention);
    if (why) return failure(api, "FewKeysAttention cannot run", why);
    Kernel kernel = {.api = api};
    TRY(INT_ATTRIBUTE(api)(info, "num_heads", &kernel.heads));
    TRY(FLOAT_ATTRIBUTE(api)(info, "scale", &kernel.scale));
    if (kernel.heads < 1 || kernel.heads > MOST_BLOCKS) return failure(api, "FewKeysAttention: num_heads", 0);
    return keep(api, "FewKeysAttention", &kernel, sizeof kernel, result);
}

/* The first kernel that can do it, FEW_KEYS_COUNT when none can. */
static int kernel_for(int64_t size, int64_t keys) {
    int i = 0;
    while (i < FEW_KEYS_COUNT && (kernels[i].size != size || (kernels[i].pieces == one && kernels[i].piece < keys))) ++i;
    return i;
}

static Status *attend(const Kernel *kernel, int which, Attention all, int images, void **pointers, void *stream) {
    const int heads = (int)kernel->heads, piece = kernels[which].piece, warps = kernels[which].warps;
    const int rows = warps * kernels[which].tiles * 16;
    /* A row has whole products of 16 channels, and an odd number of vectors. */
    const int row_size = (round_up(kernels[which].size, 16) + VECTOR) * HALF, own = kernels[which].buffers * rows * row_size;
    all.held = round_up(all.keys, piece);
    if (own + 2 * all.held * row_size > gpu.shared_memory) all.held = piece;
    /* Each block reads the keys: rather a few rounds than more blocks than run at a time. */
    const int blocks = ceil_div(all.queries, rows);
    const int64_t at_a_time = (int64_t)gpu.processors * kernels[which].blocks;
    all.rounds = 1;
    while (all.rounds < MOST_ROUNDS && (int64_t)blocks * heads * images > at_a_time * all.rounds) all.rounds *= 2;
    all.scale = kernel->scale * 1.4426950408889634f; /* log2(e) */
    void *arguments[] = {&pointers[QUERY], &pointers[KEY], &pointers[VALUE], &pointers[INPUTS], &all};
    const unsigned shared = own + 2 * all.held * row_size;
    const Launch config = {{ceil_div(blocks, all.rounds), heads, images}, {32, warps, 1}, shared, stream, 0, 0};
    const char *why = launch(gpu.few_keys_attention[which], config, arguments);
    return why ? failure(kernel->api, "FewKeysAttention cannot be launched", why) : 0;
}

/* Whether a tensor is one of a head's `parts`, (B, S, N H), or has them side by side, (B, S, N, parts, H). */
static int holds(const int64_t *dims, size_t rank, int64_t heads, int parts, int64_t size) {
    if (parts == 1) return rank == 3 && dims[2] == heads * size;
    return rank == 5 && dims[2] == heads && dims[3] == parts && dims[4] == size;
}

static Status *compute(void *op_kernel, void *context) {
    const Kernel *kernel = op_kernel;
    Api api = kernel->api;
    const int64_t heads = kernel->heads;
    const void *inputs[INPUTS];
    void *pointers[INPUTS + 1], *stream;
    int64_t dims[INPUTS][MOST_AXES];
    size_t rank[INPUTS] = {0};
    for (size_t i = 0; i < INPUTS; ++i) {
        TRY(input(api, context, i, &inputs[i], &pointers[i]));
        if (inputs[i]) TRY(shape_of(api, inputs[i], dims[i], &rank[i]));
    }
    const int key = inputs[KEY] ? KEY : QUERY, parts = inputs[KEY] ? 1 : 3, key_parts = inputs[VALUE] ? 1 : inputs[KEY] ? 2 : 3;
    const int64_t size = rank[QUERY] == 5 ? dims[QUERY][4] : rank[QUERY] == 3 ? dims[QUERY][2] / heads : 0;
    int right = holds(dims[QUERY], rank[QUERY], heads, parts, size) && holds(dims[key], rank[key], heads, key_parts, size);
    if (key_parts == 1) right = right && holds(dims[VALUE], rank[VALUE], heads, 1, size) && dims[VALUE][1] == dims[KEY][1];
    for (int i = 0; i < INPUTS && right; ++i) right = !inputs[i] || dims[i][0] == dims[QUERY][0];
    if (!right) return failure(api, "FewKeysAttention: query, key and value do not fit together", 0);
    const int64_t images = dims[QUERY][0], queries = dims[QUERY][1], keys = dims[key][1];
    const int which = kernel_for(size, keys);
    if (which == FEW_KEYS_COUNT) return failure(api, "FewKeysAttention: not for heads of this size", 0);
    if (images > MOST_BLOCKS || queries > MOST_ROWS || keys > MOST_ROWS || heads * size > MOST_ROWS || keys < 1)
        return failure(api, "FewKeysAttention: too many of something, or no key", 0);
    if (key_parts > 1) {
        pointers[KEY] = (char *)pointers[key] + (key_parts - 2) * size * HALF;
        pointers[VALUE] = (char *)pointers[KEY] + size * HALF;
    }
    const int64_t result[3] = {images, queries, heads * size};
    TRY(output(api, context, 0, result, 3, &pointers[INPUTS]));
    TRY(GPU_STREAM(api)(context, &stream));
    if (!images || !queries) return 0;
    const int head = (int)size / VECTOR;
    const Attention all = {.queries = (int)queries, .keys = (int)keys, .row = (int)heads * parts * head, .head = parts * head,
                           .key_row = (int)heads * key_parts * head, .key_head = key_parts * head};
    return attend(kernel, which, all, (int)images, pointers, stream);
}

static const char *name(const Op *op) { return (void)op, "FewKeysAttention"; }
static size_t input_count(const Op *op) { return (void)op, INPUTS; }
static int input_characteristic(const Op *op, size_t i) { return (void)op, i == QUERY ? REQUIRED : OPTIONAL; }

const Op few_keys_attention = OP(name, float16, input_count, input_characteristic, float16, one_tensor, required);
