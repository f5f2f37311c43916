// What the kernels use of CUDA C++, on the CPU: the language, and in place of overlap.cuh, float16.cuh, float8.cuh, cluster.cuh,
// mma.cuh, int8.cuh, hopper.cuh and bfloat16.cuh, the primitives that are PTX on a GPU. threads.cpp runs a block's threads.
#pragma once

#include <cmath>
#include <cstddef>

#include "hopper.h"

#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL
#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
// One place for all blocks, as on a GPU: the scheduler exchanges the content when it goes on with another block. The linker
// finds it, shared_memory.ld: g++ 12 takes no notice of a section's name within a template.
#define __shared__ static

struct alignas(8) float2 {
    float x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct Place {
    unsigned x, y, z;
};

static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

extern Place threadIdx, blockIdx, blockDim, gridDim;

// Threads that have ended count as arrived, at a block's barrier and at a cluster's. All of a warp take part in a shuffle, in
// reading matrices and in a product.
void __syncthreads();
void __syncwarp();
void wait_for_cluster();
void arrive_in_cluster();
void wait_for_arrivals();
void wait_for_earlier_kernels();  // operators.cpp
float __shfl_xor_sync(unsigned mask, float value, int distance);
static inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, int distance) {
    return __builtin_bit_cast(unsigned, __shfl_xor_sync(mask, __builtin_bit_cast(float, value), distance));
}
float2 of_block(const float2* shared, int rank);
unsigned launched_shared();
void write_shared(unsigned to, unsigned value);
void write_shared(unsigned to, uint4 value);
uint4 read_shared(unsigned from);
void copy_async(unsigned to, const uint4* from, bool there);
void end_group();
void wait_for_groups_but(unsigned left);
template <int left>
static inline void wait_for_groups() {
    wait_for_groups_but(left);
}
void read_matrices(unsigned (&to)[4], unsigned row);
void read_transposed(unsigned (&to)[4], unsigned row);
void add_product(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
void add_bytes(int (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
template <bool>
static inline void add_int8(int (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    add_bytes(sum, a, b0, b1);
}

static inline int min(int a, int b) { return a < b ? a : b; }
static inline float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
static inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
static inline int __float2int_rn(float value) { return value != value ? 0 : (int)nearbyintf(value); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
// Macros, since C libraries have functions of these names.
#define rsqrtf(x) (1.0f / sqrtf(x))
#define __expf(x) expf(x)
#define __fdividef(x, y) ((x) / (y))

static inline float power_of_two(float x) { return exp2f(x); }
static inline float reciprocal(float x) { return 1.0f / x; }

static inline float2 unpacked(unsigned pair) {
    return {(float)__builtin_bit_cast(_Float16, (unsigned short)pair),
            (float)__builtin_bit_cast(_Float16, (unsigned short)(pair >> 16))};
}

static inline unsigned packed(float low, float high) {
    return __builtin_bit_cast(unsigned short, (_Float16)low) |
           (unsigned)__builtin_bit_cast(unsigned short, (_Float16)high) << 16;
}

// To the nearest one, to the even one of two: half of the last bit, less one where that is 0 already. Of numbers.
static inline unsigned bfloat16(float value) {
    const unsigned bits = __builtin_bit_cast(unsigned, value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline unsigned packed_bfloat16(float low, float high) { return bfloat16(low) | bfloat16(high) << 16; }

// E4M3 has a sign, four bits of exponent above 2^-6 and three of fraction; 0x7f is no number, 448 the largest.
static inline unsigned eight(float value) {
    const unsigned sign = std::signbit(value) ? 0x80 : 0;
    if (value != value) return sign | 0x7f;
    const float size = fminf(fabsf(value), 448.0f);
    if (size < 0.015625f) return sign | (unsigned)nearbyintf(size * 512);
    int exponent;
    frexpf(size, &exponent);
    return sign | (unsigned)(((exponent + 6) << 3) + (int)nearbyintf(ldexpf(size, 4 - exponent)) - 8);
}

static inline float of_eight(unsigned char bits) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    if ((bits & 0x7f) == 0x7f) return NAN;
    const float size = exponent ? ldexpf(8 + fraction, exponent - 10) : ldexpf(fraction, -9);
    return bits & 0x80 ? -size : size;
}

static inline unsigned eights(float a, float b, float c, float d) {
    return eight(a) | eight(b) << 8 | eight(c) << 16 | eight(d) << 24;
}
