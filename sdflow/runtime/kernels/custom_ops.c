/* The kernels of this folder as operators of ONNX Runtime's CUDA provider, in the domain sdflow. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "ort.h"

Status *failure(Api api, const char *what, const char *why) {
    char message[256];
    snprintf(message, sizeof message, "sdflow.%s%s%s", what, why ? ": " : "", why ? why : "");
    return CREATE_STATUS(api)(1 /* ORT_FAIL */, message);
}

Status *shape_of(Api api, const void *value, int64_t *dims, size_t *count) {
    void *info = 0;
    TRY(TYPE_AND_SHAPE(api)(value, &info));
    Status *failed = DIMENSIONS_COUNT(api)(info, count);
    if (!failed && *count > MOST_AXES) failed = failure(api, "more than five axes", 0);
    if (!failed) failed = DIMENSIONS(api)(info, dims, *count);
    RELEASE_SHAPE(api)(info);
    return failed;
}

Status *elements_of(Api api, const void *value, int64_t *elements) {
    int64_t dims[MOST_AXES];
    size_t count = 0;
    TRY(shape_of(api, value, dims, &count));
    *elements = 1;
    for (size_t i = 0; i < count; ++i) *elements *= dims[i];
    return 0;
}

Status *data(Api api, const void *value, void **pointer) {
    *pointer = 0;
    return value ? TENSOR_DATA(api)(value, pointer) : 0;
}

Status *input(Api api, const void *context, size_t index, const void **value, void **pointer) {
    size_t count = 0;
    *value = 0;
    TRY(INPUT_COUNT(api)(context, &count));
    if (index < count) TRY(INPUT(api)(context, index, value));
    return data(api, *value, pointer);
}

Status *output(Api api, void *context, size_t index, const int64_t *dims, size_t rank, void **pointer) {
    void *value;
    TRY(OUTPUT(api)(context, index, dims, rank, &value));
    return data(api, value, pointer);
}

Status *keep(Api api, const char *name, const void *kernel, size_t size, void **result) {
    void *kept = malloc(size);
    if (!kept) return failure(api, name, "out of memory");
    *result = memcpy(kept, kernel, size);
    return 0;
}

/* The parts' machine code, from whoever opened this library, and which of it is loaded: into the context that is current when
 * the first session is made. */
static const void *codes[PART_COUNT];
static int loaded[PART_COUNT];

Gpu gpu;

const char *driver_error(int error) {
    const char *name = 0;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*get)(int, const char **) = driver ? dlsym(driver, "cuGetErrorName") : 0;
    return get && !get(error, &name) && name ? name : "an error without a name";
}

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

/* Gives a part, by name, its code (cubin), which stays where it is as long as this process. Returns 0 if there is such a part. */
__attribute__((visibility("default"))) int sdflow_give_code(const char *part, const void *code) {
#define NAME(NAME) #NAME,
    static const char *const names[] = {PARTS(NAME)};
    for (int i = 0; i < PART_COUNT; ++i) {
        if (strcmp(names[i], part)) continue;
        pthread_mutex_lock(&loading);
        codes[i] = code;
        pthread_mutex_unlock(&loading);
        return 0;
    }
    return 1;
}

typedef struct {
    void *module;
    int (*function)(void **, void *, const char *);
    int (*permit)(void *, int, int);
} Driver;

/* Kernels by name. Whether one is missing. */
static int find(const Driver *driver, void **found, const char *const *names, int count) {
    int missing = 0;
    for (int i = 0; i < count; ++i)
        if (driver->function(&found[i], driver->module, names[i])) found[i] = 0, missing = 1;
    return missing;
}

/* As find, of kernels that take as much shared memory. One that the device does not let have it is missing. */
static int find_large(const Driver *driver, void **found, const char *const *names, int count, int shared) {
    int missing = find(driver, found, names, count);
    for (int i = 0; i < count; ++i)
        if (found[i] && driver->permit(found[i], 8 /* MAX_DYNAMIC_SHARED_SIZE_BYTES */, shared)) found[i] = 0, missing = 1;
    return missing;
}

/* Whether a kernel is missing that each device has. */
static int find_part(Part part, const Driver *driver) {
#define FIND(INTO, ...)                                                                                              \
    find(driver, INTO, (const char *const[]){__VA_ARGS__}, sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))
    switch (part) {
    case PART_group_norm:
        FIND(gpu.held, "group_norm_held_4", "group_norm_held_8");
        if (!gpu.held[0] || !gpu.held[1]) gpu.held[0] = gpu.held[1] = 0;
        return FIND(gpu.sums, "group_norm_sums", "group_norm_sums_single") |
               FIND(gpu.apply, "group_norm_apply", "group_norm_apply_single");
    case PART_bias_split_gelu: return FIND(&gpu.bias_split_gelu, "bias_split_gelu");
    case PART_interleave: return FIND(&gpu.interleave, "interleave");
    case PART_few_keys_attention:
        return find_large(driver, gpu.few_keys_attention, few_keys_names, FEW_KEYS_COUNT, gpu.shared_memory);
    case PART_geglu:
        find_large(driver, gpu.geglu, (const char *const[]){"geglu_wide", "geglu_in_turns"}, 2, GEGLU_SHARED);
        return 0;
    case PART_float8:
        if (FIND(gpu.float8_rows, "float8_rows", "float8_split_gelu", "float8_layer_norm", "float8_rows_bfloat16"))
            gpu.float8_rows[0] = 0;
        find_large(driver, gpu.float8_product,
                   (const char *const[]){"float8_product", "float8_product_bfloat16", "float8_product_in_turns",
                                         "float8_product_in_turns_bfloat16", "float8_gated_product"}, 5, FLOAT8_SHARED);
        return 0;
    case PART_rotary_qkv: return FIND(gpu.rotary_qkv, "rotary_qkv_float16", "rotary_qkv_bfloat16");
    case PART_residual_norm:
        FIND(gpu.float8_norm, "float8_norm_half", "float8_norm_half_normed", "float8_norm_bfloat16", "float8_norm_bfloat16_normed");
        return FIND(gpu.residual_norm, "residual_norm_half", "residual_norm_half_normed", "residual_norm_bfloat16",
                    "residual_norm_bfloat16_normed");
    case PART_gated_activation:
        FIND(gpu.float8_activation, "float8_tanh_gelu_half", "float8_tanh_gelu_bfloat16", "float8_silu_gated_half",
             "float8_silu_gated_bfloat16");
        return FIND(gpu.gated_activation, "tanh_gelu_half", "tanh_gelu_bfloat16", "silu_gated_half", "silu_gated_bfloat16");
    case PART_int8:
        FIND(&gpu.int8_rows[1], "int8_rows_bfloat16");
        for (int i = 0; i < 2; ++i) { /* those of compute capability 8.0 */
            static const char *const wide[] = {"int8_product_wide_half", "int8_product_wide_bfloat16"};
            static const char *const narrow[] = {"int8_product_narrow_half", "int8_product_narrow_bfloat16"};
            find_large(driver, &gpu.int8_product[i][0], wide + i, 1, INT8_SHARED_WIDE);
            find_large(driver, &gpu.int8_product[i][1], narrow + i, 1, INT8_SHARED_NARROW);
        }
        return FIND(&gpu.int8_rows[0], "int8_rows_half") | FIND(&gpu.int8_product[0][2], "int8_product_turing_half");
    case PART_COUNT: break;
    }
    return 1;
}

static const char *load_locked(Part part) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context = 0;
    static char refusal[160];
    int device = 0, error;
    if (!driver) return "libcuda.so.1 cannot be loaded";
    int (*current)(void **) = dlsym(driver, "cuCtxGetCurrent");
    int (*device_of)(int *) = dlsym(driver, "cuCtxGetDevice");
    int (*attribute)(int *, int, int) = dlsym(driver, "cuDeviceGetAttribute");
    int (*load)(void **, const void *) = dlsym(driver, "cuModuleLoadData");
    Driver from = {0, dlsym(driver, "cuModuleGetFunction"), dlsym(driver, "cuFuncSetAttribute")};
    gpu.launch = dlsym(driver, "cuLaunchKernelEx");
    if (!current || !device_of || !attribute || !load || !from.function || !from.permit || !gpu.launch)
        return "the driver is too old";
    if (current(&context) || !context) return "there is no CUDA context";
    if (gpu.context && gpu.context != context) return "the kernels are in use on another device of this process";
    if (loaded[part]) return 0;
    if (!codes[part]) return "its kernels are not compiled";
    if (!gpu.context) {
        int major = 0;
        if (device_of(&device) || attribute(&gpu.processors, 16 /* MULTIPROCESSOR_COUNT */, device) ||
            attribute(&gpu.shared_memory, 97 /* MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */, device))
            return "no device";
        gpu.overlaps = !attribute(&major, 75 /* COMPUTE_CAPABILITY_MAJOR */, device) && major >= 9 && OVERLAPS;
        gpu.describe = dlsym(driver, "cuTensorMapEncodeTiled");
        gpu.context = context;
    }
    if ((error = load(&from.module, codes[part]))) { /* for another device, or by an NVRTC that is newer than the driver */
        snprintf(refusal, sizeof refusal, "the driver does not load the kernels: %s", driver_error(error));
        return refusal;
    }
    if (find_part(part, &from)) return "the kernels are not complete";
    if (!gpu.describe) gpu.geglu[0] = gpu.geglu[1] = gpu.float8_product[0] = gpu.float8_product[4] = 0;
    loaded[part] = 1;
    return 0;
}

const char *load_kernels(Part part) {
    pthread_mutex_lock(&loading);
    const char *why = load_locked(part);
    pthread_mutex_unlock(&loading);
    return why;
}

int map_matrix(MatrixMap *map, int type, const void *at, int64_t rows, int64_t columns, unsigned box_rows, int promotion) {
    const int size = type == TENSOR_MAP_UINT8 ? 1 : 2;
    const uint64_t sizes[2] = {(uint64_t)columns, (uint64_t)rows}, stride = (uint64_t)columns * size;
    const unsigned box[2] = {128u / size, box_rows}, each[2] = {1, 1};
    return gpu.describe(map, type, 2, (void *)at, sizes, &stride, box, each, 0, 3 /* SWIZZLE_128B */, promotion, 0);
}

const char *launch(void *function, Launch config, void **arguments) {
    Attribute attributes[2];
    unsigned count = 0;
    if (config.attributes) attributes[count++] = *config.attributes;
    if (gpu.overlaps && !gpu.joined) attributes[count++] = (Attribute){.id = PROGRAMMATIC_STREAM_SERIALIZATION, .value.allowed = 1};
    gpu.joined = 0;
    config.attributes = count ? attributes : 0;
    config.attribute_count = count;
    const int error = gpu.launch(&config, function, arguments, 0);
    return error ? driver_error(error) : 0;
}

Api registered_api;

typedef struct {
    Api (*api)(uint32_t);
} ApiBase;

__attribute__((visibility("default"))) Status *RegisterCustomOps(void *options, const ApiBase *base) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static void *domain = 0; /* sessions refer to it as long as they live */
    const Op *all[] = {&group_norm, &group_norm_single, &bias_split_gelu, &few_keys_attention, &interleave_phases,
                       &interleave_phases_single, &float8_rows, &float8_split_gelu,
                       &float8_layer_norm, &float8_product, &float8_gated_product, &geglu, &float8_rows_bfloat16,
                       &float8_product_bfloat16, &float8_norms[0], &float8_norms[1], &float8_norms[2], &float8_norms[3],
                       &float8_activations[0], &float8_activations[1], &float8_activations[2], &float8_activations[3],
                       &op_rotary_qkv, &op_rotary_qkv_bfloat16,
                       &residual_norms[0], &residual_norms[1], &residual_norms[2], &residual_norms[3], &residual_norms[4],
                       &residual_norms[5], &gated_activations[0], &gated_activations[1], &gated_activations[2],
                       &gated_activations[3], &int8_rows[0], &int8_rows[1], &int8_product[0], &int8_product[1],
                       &stream_weights, &stream_weights_on_cpu};
    Api api = base->api(ORT_VERSION);
    Status *failed = 0;
    pthread_mutex_lock(&lock);
    registered_api = api;
    if (!domain) {
        failed = CREATE_DOMAIN(api)("sdflow", &domain);
        for (size_t i = 0; !failed && i < sizeof all / sizeof *all; ++i) failed = DOMAIN_ADD(api)(domain, all[i]);
        if (failed) domain = 0;
    }
    pthread_mutex_unlock(&lock);
    return failed ? failed : ADD_DOMAIN(api)(options, domain);
}
