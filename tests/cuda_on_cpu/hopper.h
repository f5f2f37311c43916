// What hopper.cuh has in PTX, on the CPU. Shared memory is a block's own and checked.
#pragma once

#include <cstdint>

#define WARPGROUP 128

struct alignas(64) TensorMap {
    unsigned long long content[16];
};

unsigned dynamic_shared();
void make_barrier(unsigned at, int count);
void barriers_are_made();
void arrive_and_expect(unsigned at, int bytes);
void arrive(unsigned at);
void wait_for_phase(unsigned at, int parity);
void load_tile(unsigned to, const TensorMap* map, int x, int y, unsigned barrier);
void prefetch(const TensorMap* map);
void store_tile(const TensorMap* map, int x, int y, unsigned from);
void commit_stores();
void wait_for_reads();
void wait_for_stores();
void show_to_stores();
void copy_word(unsigned to, const unsigned* from);
void wait_for_words();
unsigned word_at(unsigned at);
void store_matrices(unsigned at, const unsigned (&pairs)[4]);
void meet(int barrier, int threads);
void signal(int barrier, int threads);
void multiply(float (&sums)[128], unsigned long long a, unsigned long long b, int add);
void multiply(float (&sums)[64], unsigned long long a, unsigned long long b, int add);
void multiply_eights(float (&sums)[80], unsigned long long a, unsigned long long b, int add);
void begin_products();
void commit_products();
void wait_for_products(unsigned left);

template <int COUNT>
static inline void take_registers() {}
template <int COUNT>
static inline void leave_registers() {}
template <int LEFT>
static inline void wait_for_products() {
    wait_for_products((unsigned)LEFT);
}

static inline unsigned long long matrix(unsigned at, int leading, int stride) {
    return (unsigned long long)(at >> 4 & 0x3fff) | (unsigned long long)(leading >> 4) << 16 |
           (unsigned long long)(stride >> 4) << 32 | 1ull << 62;
}

// Around a cluster's run.
void begin_hopper(unsigned blocks, unsigned threads, unsigned shared);
void end_hopper();

// cuTensorMapEncodeTiled, for matrices of float16 or uint8 whose boxes have rows of 128 swizzled bytes.
int describe_matrix(TensorMap* map, int type, unsigned rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                    const unsigned* box, const unsigned* each, int interleave, int swizzle, int promotion, int fill);
