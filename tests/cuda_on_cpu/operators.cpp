// Runs an operator: what it takes of ONNX Runtime, of the CUDA driver and of cuBLASLt, in this process' memory.
//
// operators FOLDER OPERATOR DIRECTION CAPABILITY PROCESSORS OUTPUTS [ATTRIBUTE=VALUE ...] [-- INPUT ...]
//
// DIRECTION: forwards or backwards, of `run_grid`. INPUT: as 10:2,4,4,320, ONNX's type and the axes, or `none`; its content
// is FOLDER/input<place>. Outputs begin as NaN, as large as the operator asks; they go to FOLDER/output<place>, and what
// was launched to stdout, a line each: the kernel, grid, block and cluster. While a kernel may overlap with the one before it,
// no tensor may be read or written: that is as long as it has not waited.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <sanitizer/asan_interface.h>

#include "cublaslt.h"
#include "hopper.h"
#include "threads.h"

extern "C" {
#include "ort.h"
struct ApiBase {
    Api (*api)(uint32_t);
};
Status* RegisterCustomOps(void* options, const ApiBase* base);
int sdflow_give_code(const char* part, const void* code);
void* emulated_dlopen(const char* file, int mode);
void* emulated_dlsym(void* handle, const char* name);
const char* __asan_default_options() { return "detect_leaks=0:detect_stack_use_after_return=0"; }
}

char a_stream;

namespace {

struct Tensor {
    int type = 0;
    std::vector<int64_t> dims;
    char* memory = nullptr;
    std::size_t size = 0;

    void allocate() {
        size = type == FLOAT ? 4 : type == UINT8 || type == INT8 ? 1 : 2;
        for (int64_t axis : dims) size *= axis;
        memory = static_cast<char*>(std::malloc(size));  // to the byte, for the sanitizer
        std::memset(memory, 0xff, size);
    }
};

char a_context, a_driver, a_library, a_copying_stream;  // their addresses stand for them
std::string folder;
bool backwards;
int capability, processors;
std::map<std::string, const Op*> operators;
std::map<std::string, double> attributes;
std::vector<Tensor*> inputs;
std::vector<Tensor> outputs;
const Op* op;

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::_Exit(1);
}

void require(bool holds, const char* what) {
    if (!holds) fail(what);
}

double attribute(const char* name) {
    require(attributes.count(name), "the operator reads an attribute that is not given");
    return attributes[name];
}

const Tensor* tensor(const void* value) {
    require(value, "the operator uses a tensor that is not there");
    return static_cast<const Tensor*>(value);
}

// ONNX Runtime's, at their places in OrtApi.

Status* create_status(int, const char* message) { return new std::string(message); }
Status* create_domain(const char*, void** domain) { return *domain = &operators, nullptr; }
Status* domain_add(void*, const void* added) {
    auto one = static_cast<const Op*>(added);
    if (!std::strcmp(one->provider(one), "CUDAExecutionProvider")) operators[one->name(one)] = one;
    return nullptr;
}
Status* add_domain(void*, void*) { return nullptr; }
Status* tensor_data(const void* value, void** data) { return *data = tensor(value)->memory, nullptr; }
Status* element_type(const void* info, int* type) { return *type = tensor(info)->type, nullptr; }
Status* dimensions_count(const void* info, size_t* count) { return *count = tensor(info)->dims.size(), nullptr; }
Status* dimensions(const void* info, int64_t* dims, size_t count) {
    std::copy_n(tensor(info)->dims.begin(), count, dims);
    return nullptr;
}
Status* type_and_shape(const void* value, void** info) { return *info = const_cast<Tensor*>(tensor(value)), nullptr; }
Status* float_attribute(const void*, const char* name, float* value) { return *value = attribute(name), nullptr; }
Status* int_attribute(const void*, const char* name, int64_t* value) { return *value = attribute(name), nullptr; }
Status* input_count(const void*, size_t* count) { return *count = inputs.size(), nullptr; }
Status* output_count(const void*, size_t* count) { return *count = outputs.size(), nullptr; }
Status* input(const void*, size_t index, const void** value) { return *value = inputs.at(index), nullptr; }
Status* output(void*, size_t index, const int64_t* dims, size_t count, void** value) {
    Tensor& made = outputs.at(index);
    require(!made.memory, "an output is made twice");
    made.type = op->output_type(op, index) ? op->output_type(op, index) : inputs.at(index)->type;
    made.dims.assign(dims, dims + count);
    made.allocate();
    return *value = &made, nullptr;
}
void release_shape(void*) {}
Status* gpu_stream(const void*, void** stream) { return *stream = &a_stream, nullptr; }
void not_there() { fail("a function of ONNX Runtime that is not there"); }

Api api(uint32_t version) {
    require(version == ORT_VERSION, "another version of ONNX Runtime's interface");
    static std::vector<const void*> table(300, (const void*)not_there);
    const std::map<int, const void*> functions = {
        {0, (void*)create_status},    {26, (void*)create_domain},    {27, (void*)domain_add},
        {28, (void*)add_domain},      {51, (void*)tensor_data},      {60, (void*)element_type},
        {61, (void*)dimensions_count},
        {62, (void*)dimensions},      {65, (void*)type_and_shape},   {85, (void*)float_attribute},
        {86, (void*)int_attribute},   {88, (void*)input_count},      {89, (void*)output_count},
        {90, (void*)input},           {91, (void*)output},           {99, (void*)release_shape},
        {193, (void*)gpu_stream},
    };
    for (auto [place, function] : functions) table[place] = function;
    return table.data();
}

// The driver's.

enum { INVALID_VALUE = 1, NOT_FOUND = 500 };

// Bytes that a block may have when it asks: CUDA C++ programming guide, technical specifications per compute capability.
int most_shared() { return (capability == 75 ? 64 : capability == 80 ? 163 : capability == 90 ? 227 : 99) << 10; }

std::map<const void*, int> allowed_shared;  // function -> bytes of a launch, where that is more than the 48 KB of all

int context_get(void** context) { return *context = &a_context, 0; }
int device_get(int* device) { return *device = 0, 0; }
int device_attribute(int* value, int attribute, int) {
    require(attribute == 16 || attribute == 75 || attribute == 97,
            "neither the number of multiprocessors nor the compute capability nor a block's shared memory");
    return *value = attribute == 16 ? processors : attribute == 75 ? capability / 10 : most_shared(), 0;
}
int module_load(void** module, const void* code) { return *module = const_cast<void*>(code), 0; }
int module_function(void** function, void*, const char* name) {
    for (const Kernel* kernel : {kernels, attention_kernels, transformer_kernels, int8_kernels})
        for (; kernel->name; ++kernel)
            if (!std::strcmp(kernel->name, name) && kernel->capability <= capability)
                return *function = const_cast<Kernel*>(kernel), 0;
    return NOT_FOUND;
}
int function_attribute(void* function, int attribute, int value) {
    require(attribute == 8, "not the shared memory of a launch");
    if (value > most_shared()) return INVALID_VALUE;
    return allowed_shared[function] = value, 0;
}
int error_name(int error, const char** name) {
    return *name = error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_NOT_FOUND", 0;
}

// Streams and events: what is queued, to stdout.

std::map<void*, bool> recorded;  // event -> whether it was
const char* stream_name(void* stream) {
    require(stream == &a_stream || stream == &a_copying_stream, "a stream that is not there");
    return stream == &a_stream ? "session" : "copies";
}
std::string event_name(void* event) {
    require(recorded.count(event), "an event that is not there");
    return "event " + std::to_string(*static_cast<int*>(event));
}
int stream_create(void** stream, unsigned flags) {
    require(flags == 1, "a stream that the default stream waits for");
    return *stream = &a_copying_stream, 0;
}
int event_create(void** event, unsigned flags) {
    require(flags == 2, "an event that takes the time");
    static int count;
    recorded[*event = new int(count++)] = false;
    return 0;
}
int event_destroy(void* event) {
    require(recorded.erase(event), "an event that is not there");
    return delete static_cast<int*>(event), 0;
}
int event_record(void* event, void* stream) {
    std::printf("%s: record %s\n", stream_name(stream), event_name(event).c_str());
    return recorded[event] = true, 0;
}
int stream_wait(void* stream, void* event, unsigned flags) {
    require(!flags && recorded[event], "an event that was not recorded");
    std::printf("%s: wait for %s\n", stream_name(stream), event_name(event).c_str());
    return 0;
}
int copy_to_device(uint64_t to, const void* from, size_t size, void* stream) {
    std::printf("%s: copy %zu bytes from %zu to %zu\n", stream_name(stream), size, (size_t)from, (size_t)to);
    return 0;
}
int copy_within_device(uint64_t to, uint64_t from, size_t size, void* stream) {
    std::printf("%s: pass %zu bytes\n", stream_name(stream), size);
    std::memcpy((void*)to, (void*)from, size);
    return 0;
}

bool waited;

void forbid_all() {
    for (const Tensor* one : inputs)
        if (one) ASAN_POISON_MEMORY_REGION(one->memory, one->size);
    for (const Tensor& one : outputs)
        if (one.memory) ASAN_POISON_MEMORY_REGION(one.memory, one.size);
}

void allow_all() {
    for (const Tensor* one : inputs)
        if (one) ASAN_UNPOISON_MEMORY_REGION(one->memory, one->size);
    for (const Tensor& one : outputs)
        if (one.memory) ASAN_UNPOISON_MEMORY_REGION(one.memory, one.size);
}

int launch_kernel(const Launch* config, void* function, void** arguments, void**) {
    const Kernel& kernel = *static_cast<const Kernel*>(function);
    const unsigned *grid = config->grid, *block = config->block;
    unsigned cluster = 1;
    waited = true;
    for (unsigned i = 0; i < config->attribute_count; ++i) {
        const Attribute& given = config->attributes[i];
        if (given.id == PROGRAMMATIC_STREAM_SERIALIZATION) {
            require(capability >= 90 && given.value.allowed == 1, "no overlapping launch before compute capability 9.0");
            waited = false;
            forbid_all();
            continue;
        }
        require(given.id == CLUSTER_DIMENSION && given.value.dimensions[1] == 1 && given.value.dimensions[2] == 1,
                "not a row of blocks as a cluster");
        cluster = given.value.dimensions[0];
    }
    const uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
    const bool fits = grid[0] && grid[0] <= INT32_MAX && grid[1] && grid[1] <= 65535 && grid[2] && grid[2] <= 65535 &&
                      threads && threads <= kernel.most_threads && cluster && cluster <= 8 && grid[0] % cluster == 0;
    std::printf("%s (%u, %u, %u) (%u, %u, %u) %u\n", kernel.name, grid[0], grid[1], grid[2], block[0], block[1], block[2],
                cluster);
    const unsigned shared_limit = std::max(48 << 10, allowed_shared[function]);
    if (!fits || config->stream != &a_stream || config->shared > shared_limit) return INVALID_VALUE;
    run_grid(kernel, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, cluster, config->shared,
             arguments, backwards);
    require(waited, "the kernel may overlap with the one before it, and does not wait for it");
    return 0;
}

Tensor* parsed(const char* text, std::size_t place) {
    if (!std::strcmp(text, "none")) return nullptr;
    auto* made = new Tensor;
    char* at = const_cast<char*>(text);
    made->type = std::strtol(at, &at, 10);
    while (*at) made->dims.push_back(std::strtoll(at + 1, &at, 10));
    made->allocate();
    FILE* file = std::fopen((folder + "/input" + std::to_string(place)).c_str(), "rb");
    require(file && std::fread(made->memory, 1, made->size, file) == made->size, "an input cannot be read");
    std::fclose(file);
    return made;
}

void check(Status* failed) {
    if (failed) fail(*static_cast<std::string*>(failed));
}

}  // namespace

void wait_for_earlier_kernels() {
    if (!waited) allow_all();
    waited = true;
}

void* emulated_dlopen(const char* file, int) {
    return std::strstr(file, "libcublasLt") ? &a_library : &a_driver;
}
void* emulated_dlsym(void* handle, const char* name) {
    if (handle == &a_library) return cublaslt_function(name);
    static const std::map<std::string, void*> functions = {
        {"cuCtxGetCurrent", (void*)context_get},           {"cuCtxGetDevice", (void*)device_get},
        {"cuDeviceGetAttribute", (void*)device_attribute}, {"cuModuleLoadData", (void*)module_load},
        {"cuModuleGetFunction", (void*)module_function},   {"cuLaunchKernelEx", (void*)launch_kernel},
        {"cuFuncSetAttribute", (void*)function_attribute}, {"cuTensorMapEncodeTiled", (void*)describe_matrix},
        {"cuGetErrorName", (void*)error_name},             {"cuStreamCreate", (void*)stream_create},
        {"cuEventCreate", (void*)event_create},            {"cuEventDestroy_v2", (void*)event_destroy},
        {"cuEventRecord", (void*)event_record},            {"cuStreamWaitEvent", (void*)stream_wait},
        {"cuMemcpyHtoDAsync_v2", (void*)copy_to_device},   {"cuMemcpyDtoDAsync_v2", (void*)copy_within_device},
    };
    require(functions.count(name), "a function of the driver that is not there");
    return functions.at(name);
}

int main(int count, char** given) {
    require(count >= 7, "operators FOLDER OPERATOR DIRECTION CAPABILITY PROCESSORS OUTPUTS ...");
    folder = given[1], backwards = !std::strcmp(given[3], "backwards");
    capability = std::atoi(given[4]), processors = std::atoi(given[5]);
    outputs.resize(std::atoi(given[6]));
    int i = 7;
    for (; i < count && std::strcmp(given[i], "--"); ++i) {
        const std::string text = given[i];
        attributes[text.substr(0, text.find('='))] = std::strtod(text.substr(text.find('=') + 1).c_str(), nullptr);
    }
    const ApiBase base = {api};
    check(RegisterCustomOps(&a_context, &base));
#define GIVE(NAME) require(!sdflow_give_code(#NAME, #NAME), "a part that the operators do not know");
    PARTS(GIVE)
    require(sdflow_give_code("something else", ""), "there is no such part");
    require(operators.count(given[2]), "no such operator");
    op = operators[given[2]];
    for (++i; i < count; ++i) inputs.push_back(parsed(given[i], inputs.size()));
    std::vector<std::string> before;
    for (std::size_t j = 0; j < inputs.size(); ++j) {
        if (!inputs[j]) continue;
        require(!op->input_type(op, j) || inputs[j]->type == op->input_type(op, j), "an input is of another type than the operator takes");
        before.emplace_back(inputs[j]->memory, inputs[j]->size);
    }
    void* kernel = nullptr;
    check(op->create_kernel_v2(op, api(ORT_VERSION), nullptr, &kernel));
    check(op->kernel_compute_v2(kernel, nullptr));
    op->kernel_destroy(kernel);
    std::size_t compared = 0;
    for (const Tensor* one : inputs)
        if (one) require(!std::memcmp(before[compared++].data(), one->memory, one->size), "an input was written to");
    for (std::size_t j = 0; j < outputs.size(); ++j) {
        require(outputs[j].memory, "an output was not made");
        FILE* file = std::fopen((folder + "/output" + std::to_string(j)).c_str(), "wb");
        require(file && std::fwrite(outputs[j].memory, 1, outputs[j].size, file) == outputs[j].size, "cannot be written");
        std::fclose(file);
    }
    return 0;
}
