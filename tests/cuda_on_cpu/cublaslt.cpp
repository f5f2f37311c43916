#include "cublaslt.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "cuda.h"

// Names, numbers and meanings: cublasLt.h and library_types.h of CUDA 13. Matrices lie in columns.
namespace {

enum { NOT_SUPPORTED = 15, INVALID_VALUE = 7 };
enum { R_32F = 0, R_16F = 2, R_16BF = 14, R_8F_E4M3 = 28, COMPUTE_32F = 68, OUTER_VEC_32F = 3 };
constexpr std::size_t WORKSPACE = 4096;  // of every algorithm here, which fills it

struct Description {
    int transposed_a = 0, mode_a = 0, mode_b = 0;
    const float *scales_a = nullptr, *scales_b = nullptr;
};
struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t leading;
};
struct Choice {
    uint64_t algo[8];
    std::size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

char a_handle;
std::size_t most_workspace;

template <class T>
int take(T* to, const void* from, std::size_t size) {
    if (size != sizeof(T)) return INVALID_VALUE;
    return std::memcpy(to, from, size), 0;
}

int create(void** handle) { return *handle = &a_handle, 0; }
int description(Description** made, int compute, int scale) {
    return compute == COMPUTE_32F && scale == R_32F ? *made = new Description, 0 : NOT_SUPPORTED;
}
int set(Description* to, int attribute, const void* from, std::size_t size) {
    int8_t fast;
    switch (attribute) {
        case 3: return take(&to->transposed_a, from, size);
        case 17: return take(&to->scales_a, from, size);
        case 18: return take(&to->scales_b, from, size);
        case 25: return take(&fast, from, size);
        case 31: return take(&to->mode_a, from, size);
        case 32: return take(&to->mode_b, from, size);
        default: return INVALID_VALUE;
    }
}
int release(Description* one) { return delete one, 0; }
int layout(Layout** made, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    return *made = new Layout{type, rows, columns, leading}, 0;
}
int release_layout(Layout* one) { return delete one, 0; }
int preference(void** made) { return *made = &most_workspace, 0; }
int prefer(void*, int attribute, const void* from, std::size_t size) {
    return attribute == 1 ? take(&most_workspace, from, size) : INVALID_VALUE;
}
int release_preference(void*) { return 0; }

// Of the transposed A (k, m) and B (k, n): D (m, n).
bool supported(const Description& what, const Layout& a, const Layout& b, const Layout& d) {
    const bool types = a.type == R_8F_E4M3 && b.type == R_8F_E4M3 && (d.type == R_16F || d.type == R_16BF);
    const bool sizes = a.rows == b.rows && d.rows == a.columns && d.columns == b.columns && a.rows % 16 == 0 && d.rows % 8 == 0;
    const bool dense = a.leading == (int64_t)a.rows && b.leading == (int64_t)b.rows && d.leading == (int64_t)d.rows;
    const bool scaled = what.mode_a == OUTER_VEC_32F && what.mode_b == OUTER_VEC_32F && what.scales_a && what.scales_b;
    return what.transposed_a == 1 && types && sizes && dense && scaled;
}

int choose(void* handle, const Description* what, const Layout* a, const Layout* b, const Layout*, const Layout* d, void*,
           int wanted, Choice* found, int* count) {
    *count = 0;
    if (handle != &a_handle || wanted < 1) return INVALID_VALUE;
    if (!supported(*what, *a, *b, *d) || most_workspace < WORKSPACE) return NOT_SUPPORTED;
    *found = {{d->columns}, WORKSPACE, 0, 1, {}};
    return *count = 1, 0;
}

int matmul(void* handle, const Description* what, const float* alpha, const uint8_t* a, const Layout* of_a, const uint8_t* b,
             const Layout* of_b, const float* beta, const void*, const Layout*, uint16_t* d, const Layout* of_d, const uint64_t* algo,
             void* workspace, std::size_t size, void* stream) {
    const bool given = handle == &a_handle && stream == &a_stream && size >= WORKSPACE && algo[0] == of_d->columns;
    if (!given || !supported(*what, *of_a, *of_b, *of_d) || *alpha != 1 || *beta != 0) return INVALID_VALUE;
    std::memset(workspace, 0x7f, WORKSPACE);
    for (uint64_t column = 0; column < of_d->columns; ++column)
        for (uint64_t row = 0; row < of_d->rows; ++row) {
            float sum = 0;
            for (uint64_t i = 0; i < of_a->rows; ++i)
                sum += of_eight(a[row * of_a->leading + i]) * of_eight(b[column * of_b->leading + i]);
            const float scaled = sum * what->scales_a[row] * what->scales_b[column];
            const uint16_t half = __builtin_bit_cast(uint16_t, (_Float16)scaled);
            d[column * of_d->leading + row] = of_d->type == R_16BF ? (uint16_t)bfloat16(scaled) : half;
        }
    return 0;
}

}  // namespace

void* cublaslt_function(const char* name) {
    static const std::map<std::string, void*> functions = {
        {"cublasLtCreate", (void*)create},
        {"cublasLtMatmulDescCreate", (void*)description},
        {"cublasLtMatmulDescSetAttribute", (void*)set},
        {"cublasLtMatmulDescDestroy", (void*)release},
        {"cublasLtMatrixLayoutCreate", (void*)layout},
        {"cublasLtMatrixLayoutDestroy", (void*)release_layout},
        {"cublasLtMatmulPreferenceCreate", (void*)preference},
        {"cublasLtMatmulPreferenceSetAttribute", (void*)prefer},
        {"cublasLtMatmulPreferenceDestroy", (void*)release_preference},
        {"cublasLtMatmulAlgoGetHeuristic", (void*)choose},
        {"cublasLtMatmul", (void*)matmul},
    };
    const auto found = functions.find(name);
    return found == functions.end() ? nullptr : found->second;
}
