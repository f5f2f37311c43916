// The blocks of a launch, one thread of the CPU running all of their threads in turns.
#pragma once

#include <functional>

#include "cuda.h"

struct Kernel {
    const char* name;
    void (*run)(void** arguments);
    unsigned most_threads;  // of a block, __launch_bounds__
    int capability;         // that it takes: 75, 80, 90
};

extern const Kernel kernels[], attention_kernels[], transformer_kernels[], int8_kernels[];  // up to one without a name

// The thread that runs: its block's place in the cluster, its own in the block.
struct Current {
    unsigned block, thread;
};
Current current_place();

// Other threads run until this holds.
void wait_until(std::function<bool()> holds);

// For all threads of its warp.
void meet_warp();

// Ends the process: what a kernel did that it may not.
[[noreturn]] void wrong(const char* what);

// Cluster after cluster. A thread runs until it has to wait for others, then the next one of its warp does; the next warp
// runs when none of the warp's threads can, the next block of the cluster when none of the block's can. So whatever a
// thread may do before another one, it does. `backwards`: from the last cluster, block, warp and thread to the first: of
// two accesses that no barrier orders, each comes first in one of the two directions. Shared memory begins as NaN; `shared`
// bytes of it are the launch's. Copies that go on by themselves are made at once, backwards when they are waited for.
void run_grid(const Kernel& kernel, Place grid, Place block, unsigned cluster, unsigned shared, void** arguments,
              bool backwards);
