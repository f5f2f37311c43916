/* The kernels of this folder as operators of ONNX Runtime's CUDA provider, in the domain sdflow. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

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

Status *optional_input(Api api, const void *context, size_t index, const void **value) {
    size_t count = 0;
    *value = 0;
    TRY(INPUT_COUNT(api)(context, &count));
    return index < count ? INPUT(api)(context, index, value) : 0;
}

Status *data(Api api, const void *value, void **pointer) {
    *pointer = 0;
    return value ? TENSOR_DATA(api)(value, pointer) : 0;
}

/* The kernels, loaded once into the context that is current when the first session is made. */

__asm__(".section .rodata\n.balign 64\nsdflow_cubin:\n.incbin \"" CUBIN "\"\n.byte 0\n.previous");
extern const char sdflow_cubin[] __attribute__((visibility("hidden")));

Gpu gpu;

/* The name of an error of the driver (CUresult). */
static const char *name_of(int error) {
    const char *name = 0;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*get)(int, const char **) = driver ? dlsym(driver, "cuGetErrorName") : 0;
    return get && !get(error, &name) && name ? name : "an error without a name";
}

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

static const char *load_locked(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context = 0, *module = 0;
    static char refusal[160];
    int device = 0, error;
    if (!driver) return "libcuda.so.1 cannot be loaded";
    int (*current)(void **) = dlsym(driver, "cuCtxGetCurrent");
    int (*device_of)(int *) = dlsym(driver, "cuCtxGetDevice");
    int (*attribute)(int *, int, int) = dlsym(driver, "cuDeviceGetAttribute");
    int (*load)(void **, const void *) = dlsym(driver, "cuModuleLoadData");
    int (*function)(void **, void *, const char *) = dlsym(driver, "cuModuleGetFunction");
    int (*permit)(void *, int, int) = dlsym(driver, "cuFuncSetAttribute");
    gpu.launch = dlsym(driver, "cuLaunchKernelEx");
    if (!current || !device_of || !attribute || !load || !function || !permit || !gpu.launch) return "the driver is too old";
    if (current(&context) || !context) return "there is no CUDA context";
    if (gpu.context) return gpu.context == context ? 0 : "the kernels are in use on another device of this process";
    if (device_of(&device) || attribute(&gpu.processors, 16 /* MULTIPROCESSOR_COUNT */, device) ||
        attribute(&gpu.shared_memory, 97 /* MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */, device))
        return "no device";
    if ((error = load(&module, sdflow_cubin))) { /* for another device, or by an NVRTC that is newer than the driver */
        snprintf(refusal, sizeof refusal, "the driver does not load the kernels: %s", name_of(error));
        return refusal;
    }
    if (function(&gpu.sums, module, "group_norm_sums") || function(&gpu.apply, module, "group_norm_apply") ||
        function(&gpu.sums_single, module, "group_norm_sums_single") ||
        function(&gpu.apply_single, module, "group_norm_apply_single") ||
        function(&gpu.bias_split_gelu, module, "bias_split_gelu") ||
        function(&gpu.interleave, module, "interleave"))
        return "the kernels are not complete";
    if (function(&gpu.held_4, module, "group_norm_held_4") || function(&gpu.held_8, module, "group_norm_held_8"))
        gpu.held_4 = gpu.held_8 = 0;
    if (function(&gpu.float8_rows, module, "float8_rows") ||
        function(&gpu.float8_split_gelu, module, "float8_split_gelu") ||
        function(&gpu.float8_layer_norm, module, "float8_layer_norm"))
        gpu.float8_rows = 0;
    for (int i = 0; i < FEW_KEYS_COUNT; ++i)
        if (function(&gpu.few_keys_attention[i], module, few_keys_names[i]) ||
            permit(gpu.few_keys_attention[i], 8 /* MAX_DYNAMIC_SHARED_SIZE_BYTES */, gpu.shared_memory))
            return "the kernels are not complete";
    if (function(&gpu.rotary_qkv_float16, module, "rotary_qkv_float16") ||
        function(&gpu.rotary_qkv_bfloat16, module, "rotary_qkv_bfloat16"))
        return "the kernels are not complete";
    const char *residuals[] = {"residual_norm_half", "residual_norm_half_normed", "residual_norm_bfloat16",
                               "residual_norm_bfloat16_normed"};
    const char *activations[] = {"tanh_gelu_half", "tanh_gelu_bfloat16", "silu_gated_half", "silu_gated_bfloat16"};
    for (int i = 0; i < 4; ++i)
        if (function(&gpu.residual_norm[i], module, residuals[i]) ||
            function(&gpu.gated_activation[i], module, activations[i]))
            return "the kernels are not complete";
    gpu.describe = dlsym(driver, "cuTensorMapEncodeTiled");
    void **products[] = {&gpu.geglu_wide, &gpu.geglu_in_turns, &gpu.float8_product, &gpu.float8_gated_product};
    const char *names[] = {"geglu_wide", "geglu_in_turns", "float8_product", "float8_gated_product"};
    for (int i = 0; i < 4; ++i)
        if (!gpu.describe || function(products[i], module, names[i]) ||
            permit(*products[i], 8 /* MAX_DYNAMIC_SHARED_SIZE_BYTES */, i < 2 ? GEGLU_SHARED : FLOAT8_SHARED))
            *products[i] = 0;
    int major = 0;
    gpu.overlaps = !attribute(&major, 75 /* COMPUTE_CAPABILITY_MAJOR */, device) && major >= 9 && OVERLAPS;
    gpu.context = context;
    return 0;
}

const char *load_kernels(void) {
    pthread_mutex_lock(&loading);
    const char *why = load_locked();
    pthread_mutex_unlock(&loading);
    return why;
}

const char *launch(void *function, Launch config, void **arguments) {
    Attribute attributes[2];
    unsigned count = 0;
    if (config.attributes) attributes[count++] = *config.attributes;
    if (gpu.overlaps) attributes[count++] = (Attribute){.id = PROGRAMMATIC_STREAM_SERIALIZATION, .value.allowed = 1};
    config.attributes = count ? attributes : 0;
    config.attribute_count = count;
    const int error = gpu.launch(&config, function, arguments, 0);
    return error ? name_of(error) : 0;
}

typedef struct {
    Api (*api)(uint32_t);
} ApiBase;

__attribute__((visibility("default"))) Status *RegisterCustomOps(void *options, const ApiBase *base) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static void *domain = 0; /* sessions refer to it as long as they live */
    const Op *all[] = {&group_norm, &group_norm_single, &bias_split_gelu, &few_keys_attention, &interleave_phases,
                       &interleave_phases_single, &float8_rows, &float8_split_gelu,
                       &float8_layer_norm, &float8_product, &float8_gated_product, &geglu,
                       &op_rotary_qkv, &op_rotary_qkv_bfloat16,
                       &residual_norms[0], &residual_norms[1], &residual_norms[2], &residual_norms[3], &residual_norms[4],
                       &residual_norms[5], &gated_activations[0], &gated_activations[1], &gated_activations[2],
                       &gated_activations[3]};
    Api api = base->api(ORT_VERSION);
    Status *failed = 0;
    pthread_mutex_lock(&lock);
    if (!domain) {
        failed = CREATE_DOMAIN(api)("sdflow", &domain);
        for (size_t i = 0; !failed && i < sizeof all / sizeof *all; ++i) failed = DOMAIN_ADD(api)(domain, all[i]);
        if (failed) domain = 0;
    }
    pthread_mutex_unlock(&lock);
    return failed ? failed : ADD_DOMAIN(api)(options, domain);
}
