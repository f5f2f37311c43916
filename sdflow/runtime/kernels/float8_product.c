/* sdflow.Float8Product: a matrix product of E4M3, summed up in float32, by cuBLASLt or by our kernels where they are quicker.
 *
 * inputs: rows (..., K) uint8 and their scales (M) float32, as Float8Rows gives them; weight (N, K) uint8 and its scales (N)
 * float32. outputs: (..., N) float16, or bfloat16 of Float8ProductBfloat16; cuBLASLt's workspace, empty without it. K and N are
 * multiples of 16.
 *
 * cuBLASLt has its matrices in columns: there it is the transposed weight times the rows, and the result (N, M).
 * https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api; the numbers are those of cublasLt.h of CUDA 13.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include "ort.h"

enum { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14, CUDA_R_8F_E4M3 = 28, COMPUTE_32F = 68 };
enum { DESC_TRANSA = 3, A_SCALE_POINTER = 17, B_SCALE_POINTER = 18, FAST_ACCUM = 25, A_SCALE_MODE = 31, B_SCALE_MODE = 32 };
enum { SCALE_OUTER_VEC_32F = 3, PREF_MAX_WORKSPACE_BYTES = 1 };
#define MOST_WORKSPACE ((size_t)32 << 20)

typedef struct {
    uint64_t algo[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} Choice; /* cublasLtMatmulHeuristicResult_t */

typedef struct {
    void *handle;
    int (*create)(void **);
    int (*description)(void **, int, int);
    int (*set)(void *, int, const void *, size_t);
    int (*release)(void *);
    int (*layout)(void **, int, uint64_t, uint64_t, int64_t);
    int (*release_layout)(void *);
    int (*preference)(void **);
    int (*prefer)(void *, int, const void *, size_t);
    int (*release_preference)(void *);
    int (*choose)(void *, void *, void *, void *, void *, void *, void *, int, Choice *, int *);
    int (*multiply)(void *, void *, const void *, const void *, void *, const void *, void *, const void *, const void *,
                    void *, void *, void *, const void *, void *, size_t, void *);
} Blas;

static Blas blas;
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

static const char *load_locked(void) {
    if (blas.handle) return 0;
    void *library = dlopen("libcublasLt.so.13", RTLD_NOW);
    if (!library) library = dlopen("libcublasLt.so.12", RTLD_NOW);
    if (!library) return "libcublasLt.so.13 cannot be loaded";
    Blas found = {0};
    found.create = dlsym(library, "cublasLtCreate");
    found.description = dlsym(library, "cublasLtMatmulDescCreate");
    found.set = dlsym(library, "cublasLtMatmulDescSetAttribute");
    found.release = dlsym(library, "cublasLtMatmulDescDestroy");
    found.layout = dlsym(library, "cublasLtMatrixLayoutCreate");
    found.release_layout = dlsym(library, "cublasLtMatrixLayoutDestroy");
    found.preference = dlsym(library, "cublasLtMatmulPreferenceCreate");
    found.prefer = dlsym(library, "cublasLtMatmulPreferenceSetAttribute");
    found.release_preference = dlsym(library, "cublasLtMatmulPreferenceDestroy");
    found.choose = dlsym(library, "cublasLtMatmulAlgoGetHeuristic");
    found.multiply = dlsym(library, "cublasLtMatmul");
    if (!found.create || !found.description || !found.set || !found.release || !found.layout || !found.release_layout ||
        !found.preference || !found.prefer || !found.release_preference || !found.choose || !found.multiply)
        return "this cuBLASLt is too old";
    if (found.create(&found.handle)) return "cuBLASLt cannot be used on this device";
    blas = found;
    return 0;
}

static const char *load_blas(void) {
    pthread_mutex_lock(&loading);
    const char *why = load_locked();
    pthread_mutex_unlock(&loading);
    return why;
}

/* How a product of this size is computed; made when one is first seen. Sessions with fixed shapes see one. */
typedef struct {
    int64_t rows, n, k;
    void *description, *weight, *activation, *result;
    Choice choice;
} Plan;

typedef struct {
    Api api;
    int bfloat16;
    pthread_mutex_t lock;
    Plan plan;
} Kernel;

static void release(Plan *plan) {
    if (plan->description) blas.release(plan->description);
    if (plan->weight) blas.release_layout(plan->weight);
    if (plan->activation) blas.release_layout(plan->activation);
    if (plan->result) blas.release_layout(plan->result);
    *plan = (Plan){0};
}

static int point(const Plan *plan, const void *weight_scales, const void *row_scales) {
    const int failed = blas.set(plan->description, A_SCALE_POINTER, &weight_scales, sizeof weight_scales);
    return failed ? failed : blas.set(plan->description, B_SCALE_POINTER, &row_scales, sizeof row_scales);
}

/* Null, or what failed. */
static const char *make_plan(Plan *plan, int64_t rows, int64_t n, int64_t k, const void *weight_scales, const void *row_scales,
                             int result) {
    static __thread char refusal[96];
    const int transposed = 1, mode = SCALE_OUTER_VEC_32F;
    const int8_t fast = 1; /* 1e-3 of a product, where rounding to E4M3 takes 3e-2 */
    const size_t most = MOST_WORKSPACE;
    void *preference = 0;
    int found = 0;
    int failed = blas.description(&plan->description, COMPUTE_32F, CUDA_R_32F);
    if (!failed) failed = blas.set(plan->description, DESC_TRANSA, &transposed, sizeof transposed);
    if (!failed) failed = blas.set(plan->description, FAST_ACCUM, &fast, sizeof fast);
    if (!failed) failed = blas.set(plan->description, A_SCALE_MODE, &mode, sizeof mode);
    if (!failed) failed = blas.set(plan->description, B_SCALE_MODE, &mode, sizeof mode);
    if (!failed) failed = point(plan, weight_scales, row_scales);
    if (!failed) failed = blas.layout(&plan->weight, CUDA_R_8F_E4M3, (uint64_t)k, (uint64_t)n, k);
    if (!failed) failed = blas.layout(&plan->activation, CUDA_R_8F_E4M3, (uint64_t)k, (uint64_t)rows, k);
    if (!failed) failed = blas.layout(&plan->result, result, (uint64_t)n, (uint64_t)rows, n);
    if (!failed) failed = blas.preference(&preference);
    if (!failed) failed = blas.prefer(preference, PREF_MAX_WORKSPACE_BYTES, &most, sizeof most);
    if (!failed)
        failed = blas.choose(blas.handle, plan->description, plan->weight, plan->activation, plan->result, plan->result,
                             preference, 1, &plan->choice, &found);
    if (preference) blas.release_preference(preference);
    if (!failed && found && !plan->choice.state) {
        plan->rows = rows, plan->n = n, plan->k = k;
        return 0;
    }
    release(plan);
    snprintf(refusal, sizeof refusal, "cuBLASLt has no product of float8 rows with scales (status %d)", failed);
    return refusal;
}

static Status *create(const void *op, Api api, const void *info, void **result) {
    (void)info;
    const char *why = load_kernels(PART_float8);
    if (!why && !gpu.float8_rows[0]) why = TOO_OLD_FOR_FLOAT8;
    if (!why) why = load_blas();
    if (why) return failure(api, "Float8Product cannot run", why);
    Kernel *kernel = calloc(1, sizeof *kernel);
    if (!kernel) return failure(api, "Float8Product: out of memory", 0);
    kernel->api = api, kernel->bfloat16 = op == &float8_product_bfloat16;
    pthread_mutex_init(&kernel->lock, 0);
    *result = kernel;
    return 0;
}

static void destroy(void *op_kernel) {
    Kernel *kernel = op_kernel;
    release(&kernel->plan);
    pthread_mutex_destroy(&kernel->lock);
    free(kernel);
}

static Status *multiply(Kernel *kernel, void *context, Float8Operands *of, Float8Sizes *sizes) {
    Api api = kernel->api;
    Plan *plan = &kernel->plan;
    const float one = 1, nothing = 0;
    const int64_t rows = sizes->rows, n = sizes->n, k = sizes->k;
    void *workspace, *stream;
    sizes->dims[sizes->rank - 1] = n;
    TRY(output(api, context, 0, sizes->dims, sizes->rank, &of->to));
    TRY(GPU_STREAM(api)(context, &stream));
    const int tiles = float8_tiles_suit(rows, n, k);
    if (rows && !tiles && (plan->rows != rows || plan->n != n || plan->k != k)) {
        release(plan);
        const char *why = make_plan(plan, rows, n, k, of->weight_scales, of->row_scales, of->bfloat16 ? CUDA_R_16BF : CUDA_R_16F);
        if (why) return failure(api, "Float8Product", why);
    }
    const int64_t size = rows && !tiles ? (int64_t)plan->choice.workspace : 0;
    TRY(output(api, context, 1, &size, 1, &workspace));
    if (!rows) return 0;
    if (tiles) {
        const char *why = multiply_float8_tiles(of, rows, n, k, stream);
        return why ? failure(api, "Float8Product cannot be launched", why) : 0;
    }
    int failed = point(plan, of->weight_scales, of->row_scales);
    if (!failed)
        failed = blas.multiply(blas.handle, plan->description, &one, of->weight, plan->weight, of->rows, plan->activation,
                               &nothing, of->to, plan->result, of->to, plan->result, plan->choice.algo, workspace,
                               (size_t)size, stream);
    char why[48];
    snprintf(why, sizeof why, "cuBLASLt's status is %d", failed);
    return failed ? failure(api, "Float8Product cannot be queued", why) : 0;
}

static Status *compute(void *op_kernel, void *context) {
    Kernel *kernel = op_kernel;
    Float8Operands of;
    Float8Sizes sizes;
    TRY(read_float8_operands(kernel->api, context, "Float8Product", 0, &of, &sizes));
    of.bfloat16 = kernel->bfloat16;
    pthread_mutex_lock(&kernel->lock); /* the scales' places are in the plan */
    Status *failed = multiply(kernel, context, &of, &sizes);
    pthread_mutex_unlock(&kernel->lock);
    return failed;
}

static const char *name(const Op *op) { return op == &float8_product ? "Float8Product" : "Float8ProductBfloat16"; }
static int input_type(const Op *op, size_t i) { return (void)op, i % 2 ? FLOAT : UINT8; }
static int output_type(const Op *op, size_t i) { return i ? UINT8 : op == &float8_product ? FLOAT16 : BFLOAT16; }
static size_t input_count(const Op *op) { return (void)op, 4; }
static size_t output_count(const Op *op) { return (void)op, 2; }

#define PRODUCT                                                                                                     \
    {                                                                                                               \
        ORT_VERSION, 0, name, on_cuda, input_type, input_count, output_type, output_count, 0, destroy,               \
            required, required, on_device, none, none, none, none, create, compute, 0, 0, 0, 0, 0, 0, 0,             \
    }
const Op float8_product = PRODUCT, float8_product_bfloat16 = PRODUCT;
