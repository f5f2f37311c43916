/* What of ONNX Runtime's C interface an operator takes, and the launching of kernels.
 *
 * ONNX Runtime's headers come with no Python package. Its interface is a table of functions to which later versions only
 * append, so that the few in use are named here by their place in it (onnxruntime_c_api.h, OrtApi); so is the interface
 * of an operator up to version 16 of that interface (OrtCustomOp).
 */
#ifndef SDFLOW_ORT_H
#define SDFLOW_ORT_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "few_keys_attention.h"

#define ORT_VERSION 16
#define ALIAS_VERSION 19 /* of the interface of an operator that says which outputs have an input's memory */
#define VECTOR 8 /* channels of a thread, in all kernels */

enum { FLOAT = 1, UINT8 = 2, INT8 = 3, FLOAT16 = 10, BFLOAT16 = 16 };
enum { REQUIRED = 0, OPTIONAL = 1 };

typedef const void *const *Api;
typedef void Status;

#define CALL(api, place, result, ...) ((result (*)(__VA_ARGS__))(api)[place])
#define CREATE_STATUS(api) CALL(api, 0, Status *, int, const char *)
#define CREATE_DOMAIN(api) CALL(api, 26, Status *, const char *, void **)
#define DOMAIN_ADD(api) CALL(api, 27, Status *, void *, const void *)
#define ADD_DOMAIN(api) CALL(api, 28, Status *, void *, void *)
#define TENSOR_DATA(api) CALL(api, 51, Status *, const void *, void **)
#define ELEMENT_TYPE(api) CALL(api, 60, Status *, const void *, int *)
#define DIMENSIONS_COUNT(api) CALL(api, 61, Status *, const void *, size_t *)
#define DIMENSIONS(api) CALL(api, 62, Status *, const void *, int64_t *, size_t)
#define TYPE_AND_SHAPE(api) CALL(api, 65, Status *, const void *, void **)
#define FLOAT_ATTRIBUTE(api) CALL(api, 85, Status *, const void *, const char *, float *)
#define INT_ATTRIBUTE(api) CALL(api, 86, Status *, const void *, const char *, int64_t *)
#define INPUT_COUNT(api) CALL(api, 88, Status *, const void *, size_t *)
#define OUTPUT_COUNT(api) CALL(api, 89, Status *, const void *, size_t *)
#define INPUT(api) CALL(api, 90, Status *, const void *, size_t, const void **)
#define OUTPUT(api) CALL(api, 91, Status *, void *, size_t, const int64_t *, size_t, void **)
#define RELEASE_SHAPE(api) CALL(api, 99, void, void *)
#define INFERRED_INPUT(api) CALL(api, 268, Status *, const void *, size_t, void **)
#define INFERRED_ATTRIBUTE(api) CALL(api, 269, Status *, const void *, const char *, const void **)
#define INFERRED_OUTPUT(api) CALL(api, 270, Status *, const void *, size_t, const void *)
#define READ_ATTRIBUTE(api) CALL(api, 272, Status *, const void *, int, void *, size_t, size_t *)
#define GPU_STREAM(api) CALL(api, 193, Status *, const void *, void **)

#define TRY(call)                     \
    do {                              \
        Status *failed = (call);      \
        if (failed) return failed;    \
    } while (0)

/* A status that says what, and why unless that is null. */
Status *failure(Api api, const char *what, const char *why);

#define MOST_AXES 5

/* Up to MOST_AXES axes of a tensor. */
Status *shape_of(Api api, const void *value, int64_t *dims, size_t *count);

/* How many they are in all. */
Status *elements_of(Api api, const void *value, int64_t *elements);

/* An input and its memory; both are null where an optional one is not given. */
Status *input(Api api, const void *context, size_t index, const void **value, void **pointer);

/* The memory of an output of these dimensions. */
Status *output(Api api, void *context, size_t index, const int64_t *dims, size_t rank, void **pointer);

/* A tensor's memory; null for no tensor. */
Status *data(Api api, const void *value, void **pointer);

/* A copy of an operator's kernel, which is freed with its session. */
Status *keep(Api api, const char *name, const void *kernel, size_t size, void **result);

static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline int round_up(int value, int unit) { return ceil_div(value, unit) * unit; }

/* CUlaunchConfig and CUlaunchAttribute of cuda.h. */
typedef struct {
    int id, padding;
    union {
        char size[64];
        unsigned dimensions[3];
        int allowed;
    } value;
} Attribute;

typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned attribute_count;
} Launch;

enum { CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

#define ADD_ONE(...) +1
enum { FEW_KEYS_COUNT = 0 FEW_KEYS_KERNELS(ADD_ONE) };

/* The device of this process that the kernels were loaded on. Those that it cannot have are null. */
typedef struct {
    void *context, *sums[2], *apply[2], *held[2], *bias_split_gelu, *interleave; /* sums, apply: float16, float32 */
    void *few_keys_attention[FEW_KEYS_COUNT], *geglu[2];                         /* geglu: wide, in turns */
    void *float8_rows[4]; /* of values, gated GELUs, layer normalizations; of values in bfloat16 */
    void *float8_product[5]; /* float16 and bfloat16, the same with warpgroups in turns, gated */
    void *rotary_qkv[2], *residual_norm[4], *gated_activation[4];
    void *float8_norm[4], *float8_activation[4]; /* the same in the same order, of which products of float8 read */
    void *int8_rows[2], *int8_product[2][3]; /* float16, bfloat16; products: wide, narrow, for compute capability 7.5 */
    int shared_memory; /* bytes that a block may have */
    int processors, overlaps; /* overlaps: a kernel may be launched while the one before it runs */
    int joined;               /* the next kernel may not: its stream waits for another */
    int (*launch)(const Launch *, void *, void **, void **);
    /* cuTensorMapEncodeTiled, in the order of cuda.h */
    int (*describe)(void *, int, unsigned, void *, const uint64_t *, const uint64_t *, const unsigned *, const unsigned *, int,
                    int, int, int);
} Gpu;

extern Gpu gpu;
extern const char *const few_keys_names[FEW_KEYS_COUNT];

/* Bytes of shared memory of a block, as geglu.cu divides it: stages, results, biases, barriers. */
#define GEGLU_SHARED (4 * 6 * 8192 + 2 * 16384 + 2 * 512 + 6 * 16)

/* The same of float8_product.cu: tiles, two barriers for each, two more. */
enum { FLOAT8_ROWS = 128, FLOAT8_COLUMNS = 160, FLOAT8_DEPTH = 128 };
#define FLOAT8_SHARED (FLOAT8_STAGES * ((FLOAT8_ROWS + FLOAT8_COLUMNS) * FLOAT8_DEPTH + 2 * 8) + 2 * 8)

#define TOO_OLD_FOR_FLOAT8 "float8 needs a GPU of compute capability 8.9 or newer"

/* The same of int8_product.cu: tiles of rows and weight. INT8_DEEPEST: depth up to which sums fit int32, and what Int8Rows takes. */
enum { INT8_DOWN = 128, INT8_DEPTH = 64, INT8_DEEPEST = 20480 };
#define INT8_SHARED_WIDE (INT8_WIDE_STAGES * (INT8_DOWN + 256) * INT8_DEPTH)
#define INT8_SHARED_NARROW (INT8_NARROW_STAGES * (INT8_DOWN + 128) * INT8_DEPTH)
#define INT8_SHARED_TURING (2 * (INT8_DOWN + 128) * INT8_DEPTH)

#define TOO_OLD_FOR_BFLOAT16 "bfloat16 needs a GPU of compute capability 8.0 or newer"

/* What is compiled apart, and loaded when an operator of it is first made. */
#define PARTS(X)                                                                                                     \
    X(group_norm) X(bias_split_gelu) X(interleave) X(few_keys_attention) X(geglu) X(float8) X(rotary_qkv)            \
    X(residual_norm) X(gated_activation) X(int8)
#define PART(NAME) PART_##NAME,
typedef enum { PARTS(PART) PART_COUNT } Part;

/* Loads the kernels of a part unless they are. Returns why that cannot be done, else null. */
const char *load_kernels(Part part);

/* The name of an error of the driver (CUresult). */
const char *driver_error(int error);

/* ONNX Runtime's interface, from when this library was first registered. */
extern Api registered_api;

/* Null when the kernel is queued, else why it is not. */
const char *launch(void *function, Launch config, void **arguments);

/* CUtensorMap: a matrix in memory, and the box of it that Hopper's copy engine moves at once. */
typedef struct {
    uint64_t content[16];
} __attribute__((aligned(64))) MatrixMap;

enum { TENSOR_MAP_UINT8 = 0, TENSOR_MAP_FLOAT16 = 6, L2_PROMOTION_NONE = 0, L2_PROMOTION_256 = 3 };

/* A matrix in rows, which is moved in boxes of `box_rows` rows of 128 swizzled bytes. Returns the driver's error. */
int map_matrix(MatrixMap *map, int type, const void *at, int64_t rows, int64_t columns, unsigned box_rows, int promotion);

/* Of a product of float8 rows, where they are on the device. bias: null without gates; to: the result. */
typedef struct {
    const void *rows, *row_scales, *weight, *weight_scales, *bias;
    void *to;
    int bfloat16; /* of the result; not with gates */
} Float8Operands;

/* dims: of the rows, and how many axes that are. n, k: of the weight (n, k). */
typedef struct {
    int64_t dims[MOST_AXES], rows, n, k;
    size_t rank;
} Float8Sizes;

/* What an operator reads: rows, their scales, weight, its scales and, with gates, bias. */
Status *read_float8_operands(Api api, const void *context, const char *name, int gates, Float8Operands *of, Float8Sizes *sizes);

/* Whether our kernel is there for a product of this size, and quicker than cuBLASLt. rows: (rows, k), weight: (n, k). */
int float8_tiles_suit(int64_t rows, int64_t n, int64_t k);

/* Null when it is queued, else why it is not. */
const char *multiply_float8_tiles(const Float8Operands *of, int64_t rows, int64_t n, int64_t k, void *stream);

/* OrtCustomOp, as far as version 19 of the interface reads it. */
typedef struct Op {
    uint32_t version;
    void *(*create_kernel)(const struct Op *, Api, const void *);
    const char *(*name)(const struct Op *);
    const char *(*provider)(const struct Op *);
    int (*input_type)(const struct Op *, size_t);
    size_t (*input_count)(const struct Op *);
    int (*output_type)(const struct Op *, size_t);
    size_t (*output_count)(const struct Op *);
    void (*kernel_compute)(void *, void *);
    void (*kernel_destroy)(void *);
    int (*input_characteristic)(const struct Op *, size_t);
    int (*output_characteristic)(const struct Op *, size_t);
    int (*input_memory)(const struct Op *, size_t);
    int (*variadic_input_min)(const struct Op *);
    int (*variadic_input_homogeneous)(const struct Op *);
    int (*variadic_output_min)(const struct Op *);
    int (*variadic_output_homogeneous)(const struct Op *);
    Status *(*create_kernel_v2)(const void *, Api, const void *, void **);
    Status *(*kernel_compute_v2)(void *, void *);
    /* since version 17 */
    Status *(*infer_shapes)(const struct Op *, void *);
    int (*start_version)(const struct Op *), (*end_version)(const struct Op *);
    /* since version 18 */
    size_t (*may_inplace)(int **, int **);
    void (*release_may_inplace)(int *, int *);
    size_t (*alias)(int **, int **);
    void (*release_alias)(int *, int *);
} Op;

extern const Op group_norm, group_norm_single, bias_split_gelu, geglu, few_keys_attention;
extern const Op interleave_phases, interleave_phases_single;
extern const Op op_rotary_qkv, op_rotary_qkv_bfloat16;
extern const Op residual_norms[6], gated_activations[4];
extern const Op float8_rows, float8_rows_bfloat16, float8_split_gelu, float8_layer_norm;
extern const Op float8_product, float8_product_bfloat16, float8_gated_product;
extern const Op stream_weights, stream_weights_on_cpu;
extern const Op float8_norms[4], float8_activations[4];
extern const Op int8_rows[2], int8_product[2];

static inline const char *on_cuda(const Op *op) { return (void)op, "CUDAExecutionProvider"; }
static inline int on_device(const Op *op, size_t index) { return (void)op, (void)index, 0; }
static inline int none(const Op *op) { return (void)op, 0; }
static inline int float16(const Op *op, size_t index) { return (void)op, (void)index, FLOAT16; }
static inline int required(const Op *op, size_t index) { return (void)op, (void)index, REQUIRED; }
static inline size_t one_tensor(const Op *op) { return (void)op, 1; }

/* An operator of these functions, and of `create` and `compute` of its file. */
#define OP(NAME, INPUT_TYPE, INPUT_COUNT, INPUT_IS, OUTPUT_TYPE, OUTPUT_COUNT, OUTPUT_IS)                            \
    {                                                                                                                \
        ORT_VERSION, 0, NAME, on_cuda, INPUT_TYPE, INPUT_COUNT, OUTPUT_TYPE, OUTPUT_COUNT, 0, free, INPUT_IS,        \
            OUTPUT_IS, on_device, none, none, none, none, create, compute, 0, 0, 0, 0, 0, 0, 0,                      \
    }

#endif
