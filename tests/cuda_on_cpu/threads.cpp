#include "threads.h"

#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define UNCHECKED __attribute__((no_sanitize("address"), noinline, optimize("O2")))

Place threadIdx, blockIdx, blockDim, gridDim;

// Keeps the registers that a function must keep on the stack, whose end goes to *from, and takes those of the stack `to`.
extern "C" void switch_stacks(void** from, void* to);
asm(R"(
.pushsection .text
switch_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.popsection
)");

extern "C" char __start_shared_memory[], __stop_shared_memory[];  // shared_memory.ld

namespace {

enum class State { READY, IN_WARP, AT_BLOCK, AT_CLUSTER, UNTIL, ENDED };

constexpr unsigned WARP = 32;
constexpr std::size_t STACK = 1 << 16, ENTRY = 1 << 10;  // ENTRY: more than thread_main takes of it
constexpr std::uint64_t END_OF_STACK = 0x5ac0ffee5ac0ffee;

union Brought {
    float value;
    const uint4* row;
    unsigned words[6];
};

struct Copy {
    uint4* to;
    const uint4* from;  // null: zeros
    unsigned group;
};

struct Thread {
    State state;
    void* stack;
    unsigned meetings, groups;
    unsigned arrivals;  // in the cluster
    bool arrived;  // and has not waited for the others yet
    std::vector<Copy> copies;  // that it has not waited for
    std::function<bool()> holds;  // what it waits for
};

struct Warp {  // what its threads bring to where they meet, to the even ones and to the odd ones
    Brought brought[2][WARP];
    int kinds[2][WARP];
};

struct Block {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<char> shared;
    std::unique_ptr<char[]> launched;  // as the launch asks for, to the byte, for the sanitizer
    bool started = false, ended = false;
};

std::vector<Block> blocks;  // of the cluster that runs
bool descending;
unsigned current_block, loaded_block, current_thread;  // loaded: whose shared memory lies in place
unsigned met;  // how often all threads of the cluster have arrived
void* scheduler;  // its stack, while a thread runs
const void* scheduler_bottom;  // of its stack, and how large that is: for the sanitizer
std::size_t scheduler_size;
char* stacks;
void (*kernel_run)(void**);
void** kernel_arguments;
std::size_t launched_size;

unsigned turn(unsigned i, unsigned count) { return descending ? count - 1 - i : i; }

UNCHECKED void copy(char* to, const char* from, std::size_t size) {  // with the gaps that are not to be touched
    for (std::size_t i = 0; i < size; ++i) to[i] = from[i];
}

std::size_t shared_size() { return __stop_shared_memory - __start_shared_memory; }

void load(unsigned block) {
    if (block == loaded_block) return;
    copy(blocks[loaded_block].shared.data(), __start_shared_memory, shared_size());
    copy(__start_shared_memory, blocks[block].shared.data(), shared_size());
    loaded_block = block;
}

Thread& current() { return blocks[current_block].threads[current_thread]; }

void wait(State state) {
    Thread& thread = current();
    thread.state = state;
    void* kept;
    __sanitizer_start_switch_fiber(state == State::ENDED ? nullptr : &kept, scheduler_bottom, scheduler_size);
    switch_stacks(&thread.stack, scheduler);
    __sanitizer_finish_switch_fiber(kept, nullptr, nullptr);
}

void thread_main() {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size);
    kernel_run(kernel_arguments);
    if (!current().copies.empty()) wrong("a copy that its thread did not wait for");
    wait(State::ENDED);
    std::abort();
}

char* stack_of(unsigned block, unsigned thread) { return stacks + (block * blocks[0].threads.size() + thread) * STACK; }

void prepare(unsigned block, unsigned thread) {
    char* bottom = stack_of(block, thread);
    std::memcpy(bottom, &END_OF_STACK, sizeof END_OF_STACK);
    __asan_unpoison_memory_region(bottom + STACK - ENTRY, ENTRY);  // of the thread that ended here
    void** top = reinterpret_cast<void**>(bottom + STACK);
    *--top = nullptr;  // the address that thread_main would return to
    *--top = reinterpret_cast<void*>(&thread_main);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    blocks[block].threads[thread] = {State::READY, top, 0, 0, 0, false, {}, {}};
}

void resume(unsigned thread) {
    current_thread = thread;
    threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
    void* kept;
    __sanitizer_start_switch_fiber(&kept, stack_of(current_block, thread), STACK);
    switch_stacks(&scheduler, current().stack);
    __sanitizer_finish_switch_fiber(kept, nullptr, nullptr);
    if (std::memcmp(stack_of(current_block, thread), &END_OF_STACK, sizeof END_OF_STACK)) wrong("a stack is too small");
}

bool run_warp(unsigned warp) {
    Block& block = blocks[current_block];
    const unsigned first = warp * WARP, size = min(WARP, block.threads.size() - first);
    for (bool ran = false;;) {
        unsigned in_warp = 0;
        for (unsigned i = 0; i < size; ++i) {
            const unsigned lane = turn(i, size);
            Thread& thread = block.threads[first + lane];
            if (thread.state == State::UNTIL && thread.holds()) thread.state = State::READY;
            if (thread.state == State::READY) resume(first + lane), ran = true;
            in_warp += thread.state == State::IN_WARP;
        }
        if (in_warp < WARP) return ran;
        for (unsigned lane = 0; lane < WARP; ++lane) block.threads[first + lane].state = State::READY;
    }
}

// Lets all of a block go on that wait at its barrier if nobody is missing.
bool release(Block& block) {
    bool found = false;
    for (const Thread& thread : block.threads) {
        if (thread.state != State::AT_BLOCK && thread.state != State::ENDED) return false;
        found |= thread.state == State::AT_BLOCK;
    }
    for (Thread& thread : block.threads)
        if (thread.state == State::AT_BLOCK) thread.state = State::READY;
    return found;
}

// Lets all of the cluster go on that wait for an arrival of which nobody's is missing.
bool release_cluster() {
    bool all = true, found = false;
    for (const Block& block : blocks)
        for (const Thread& thread : block.threads) all &= thread.arrivals > met || thread.state == State::ENDED;
    met += all;
    for (Block& block : blocks)
        for (Thread& thread : block.threads)
            if (thread.state == State::AT_CLUSTER && thread.arrivals <= met) thread.state = State::READY, found = true;
    return found;
}

bool run_block(unsigned block) {
    if (blocks[block].ended) return false;
    load(block);
    blocks[block].started = true;
    bool ran = false;
    for (bool more = true; more; ran |= more) {
        more = false;
        const unsigned warps = blocks[block].warps.size();
        for (unsigned i = 0; i < warps; ++i) more |= run_warp(turn(i, warps));
        more |= release(blocks[block]);
    }
    bool ended = true;
    for (const Thread& thread : blocks[block].threads) ended &= thread.state == State::ENDED;
    blocks[block].ended = ended;
    return ran;
}

void run_cluster(Place first) {
    met = 0;
    for (unsigned i = 0; i < blocks.size(); ++i) {
        blocks[i].started = blocks[i].ended = false;
        std::memset(blocks[i].shared.data(), 0xff, shared_size());
        std::memset(blocks[i].launched.get(), 0xff, launched_size);
        for (unsigned j = 0; j < blocks[i].threads.size(); ++j) prepare(i, j);
    }
    copy(__start_shared_memory, blocks[loaded_block].shared.data(), shared_size());
    for (bool ran = true; ran;) {
        ran = false;
        for (unsigned i = 0; i < blocks.size(); ++i) {
            current_block = turn(i, blocks.size());
            blockIdx = {first.x + current_block, first.y, first.z};
            ran |= run_block(current_block);
        }
        ran |= release_cluster();
    }
    for (const Block& block : blocks)
        if (!block.ended) wrong("threads wait for others that never come");
}

}  // namespace

void wrong(const char* what) {
    std::fprintf(stderr, "block (%u, %u, %u), thread (%u, %u, %u): %s\n", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
                 threadIdx.y, threadIdx.z, what);
    std::_Exit(1);
}

Current current_place() { return {current_block, current_thread}; }

void wait_until(std::function<bool()> holds) {
    if (holds()) return;
    current().holds = std::move(holds);
    wait(State::UNTIL);
}

void meet_warp() { wait(State::IN_WARP); }

void __syncthreads() { wait(State::AT_BLOCK); }

void arrive_in_cluster() {
    Thread& thread = current();
    if (thread.arrived) wrong("a thread arrives again before it has waited for the others");
    thread.arrived = true;
    ++thread.arrivals;
}

void wait_for_arrivals() {
    if (!current().arrived) wrong("a thread waits for arrivals without its own");
    current().arrived = false;
    wait(State::AT_CLUSTER);
}

void wait_for_cluster() {
    arrive_in_cluster();
    wait_for_arrivals();
}

// Brings what the warp's threads give each other here, and returns what all of them brought. kind: what they do here.
static const Brought* bring(int kind, const Brought& mine) {
    const unsigned lane = current_thread % WARP, parity = current().meetings++ % 2;
    Warp& warp = blocks[current_block].warps[current_thread / WARP];
    warp.brought[parity][lane] = mine;
    warp.kinds[parity][lane] = kind;
    wait(State::IN_WARP);
    if (warp.kinds[parity][(lane + 1) % WARP] != kind) wrong("a warp's threads are at different places");
    return warp.brought[parity];
}

enum Kind { SYNC = -1, MATRICES = -2, PRODUCT = -3 };  // of a shuffle: its distance

void __syncwarp() { bring(SYNC, {}); }

float __shfl_xor_sync(unsigned mask, float value, int distance) {
    const unsigned other = current_thread % WARP ^ distance;
    if (mask != 0xffffffffu || other >= WARP) wrong("a shuffle is not of a whole warp");
    return bring(distance, {.value = value})[other].value;
}

// Addresses in shared memory begin behind null, so that this is none.
constexpr unsigned LAUNCHED = 1024;

unsigned launched_shared() { return LAUNCHED; }

static char* launched(unsigned address) { return blocks[current_block].launched.get() + (std::ptrdiff_t)address - LAUNCHED; }

void write_shared(unsigned to, unsigned value) { *reinterpret_cast<unsigned*>(launched(to)) = value; }

void write_shared(unsigned to, uint4 value) { *reinterpret_cast<uint4*>(launched(to)) = value; }

uint4 read_shared(unsigned from) { return *reinterpret_cast<const uint4*>(launched(from)); }

void copy(const Copy& one) { *one.to = one.from ? *one.from : uint4{0, 0, 0, 0}; }

void copy_async(unsigned to, const uint4* from, bool there) {
    Thread& thread = current();
    thread.copies.push_back({reinterpret_cast<uint4*>(launched(to)), there ? from : nullptr, thread.groups});
    if (!descending) copy(thread.copies.back());
}

void end_group() { ++current().groups; }

void wait_for_groups_but(unsigned left) {
    Thread& thread = current();
    std::vector<Copy> later;
    for (const Copy& one : thread.copies) {
        if (one.group + left >= thread.groups) later.push_back(one);
        else if (descending) copy(one);
    }
    thread.copies = std::move(later);
}

// Row `row` of the matrix, as lanes named the rows.
static const unsigned short* matrix_row(const Brought* brought, unsigned matrix, unsigned row) {
    return reinterpret_cast<const unsigned short*>(brought[8 * matrix + row].row);
}

void read_matrices(unsigned (&to)[4], unsigned row) {
    const unsigned lane = current_thread % WARP;
    const Brought* brought = bring(MATRICES, {.row = reinterpret_cast<const uint4*>(launched(row))});
    for (unsigned i = 0; i < 4; ++i) std::memcpy(&to[i], matrix_row(brought, i, lane / 4) + lane % 4 * 2, sizeof to[i]);
}

void read_transposed(unsigned (&to)[4], unsigned row) {
    const unsigned lane = current_thread % WARP, first = lane % 4 * 2;
    const Brought* brought = bring(MATRICES, {.row = reinterpret_cast<const uint4*>(launched(row))});
    for (unsigned i = 0; i < 4; ++i)
        to[i] = matrix_row(brought, i, first)[lane / 4] | (unsigned)matrix_row(brought, i, first + 1)[lane / 4] << 16;
}

void add_product(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned lane = current_thread % WARP;
    const Brought* brought = bring(PRODUCT, {.words = {a[0], a[1], a[2], a[3], b0, b1}});
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (unsigned k = 0; k < 16; k += 2) {
            const unsigned of_a = brought[row * 4 + k / 2 % 4].words[i / 2 + k / 8 * 2];
            const unsigned of_b = brought[column * 4 + k / 2 % 4].words[4 + k / 8];
            const float2 left = unpacked(of_a), right = unpacked(of_b);
            sum[i] += left.x * right.x + left.y * right.y;
        }
    }
}

// As add_product, with four bytes in a word in place of two halves.
void add_bytes(int (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned lane = current_thread % WARP;
    const Brought* brought = bring(PRODUCT, {.words = {a[0], a[1], a[2], a[3], b0, b1}});
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (unsigned k = 0; k < 32; ++k) {
            const unsigned of_a = brought[row * 4 + k / 4 % 4].words[i / 2 + k / 16 * 2];
            const unsigned of_b = brought[column * 4 + k / 4 % 4].words[4 + k / 16];
            sum[i] += (signed char)(of_a >> k % 4 * 8) * (signed char)(of_b >> k % 4 * 8);
        }
    }
}

float2 of_block(const float2* shared, int rank) {
    const std::size_t at = reinterpret_cast<const char*>(shared) - __start_shared_memory;
    if (at > shared_size() - sizeof *shared) wrong("another block is asked for what is not in shared memory");
    if (rank < 0 || rank >= static_cast<int>(blocks.size())) wrong("the cluster has no such block");
    float2 value = *shared;  // for the checks of the address
    if (rank == static_cast<int>(current_block)) return value;
    if (current().arrived) wrong("shared memory is read of a block that may have ended: this thread has arrived before");
    if (!blocks[rank].started || blocks[rank].ended) wrong("shared memory is read of a block that does not run");
    std::memcpy(&value, blocks[rank].shared.data() + at, sizeof value);
    return value;
}

void run_grid(const Kernel& kernel, Place grid, Place block, unsigned cluster, unsigned shared, void** arguments,
              bool backwards) {
    const unsigned threads = block.x * block.y * block.z, clusters = grid.x / cluster * grid.y * grid.z;
    kernel_run = kernel.run, kernel_arguments = arguments, descending = backwards, launched_size = shared;
    gridDim = grid, blockDim = block, loaded_block = 0;
    blocks = std::vector<Block>(cluster);
    for (Block& one : blocks) {
        one.threads.resize(threads);
        one.warps.resize((threads + WARP - 1) / WARP);
        one.shared.resize(shared_size());
        one.launched.reset(new char[shared]);
    }
    const std::size_t size = cluster * threads * STACK;
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) wrong("no memory for the stacks");
    stacks = static_cast<char*>(memory);
    for (unsigned i = 0; i < clusters; ++i) {
        const unsigned at = turn(i, clusters), across = grid.x / cluster;
        begin_hopper(cluster, threads, shared);
        run_cluster({at % across * cluster, at / across % grid.y, at / across / grid.y});
        end_hopper();
    }
    munmap(memory, size);
}
