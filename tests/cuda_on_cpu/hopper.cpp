#include "hopper.h"

#include <cstring>
#include <deque>
#include <map>
#include <vector>

#include "threads.h"

// What a thread has begun is done when it waits for that, as late as may be: what reads too early finds what was there before,
// and what is overwritten too early is lost. Loads are done at once, as early as may be. What is multiplied must be the same from
// the beginning to the end.
namespace {

constexpr unsigned LANES = 32, MOST_BARRIERS = 16, BLOCK_SHARED = 227 << 10;

struct Map {  // in a TensorMap
    char* address;
    uint64_t columns, rows, stride;
    unsigned box_columns, box_rows, size;  // size: of an element
};
static_assert(sizeof(Map) <= sizeof(TensorMap));

struct Phases {
    int count, missing;
    long bytes;
    int parity;
};
struct Meeting {
    unsigned arrived, threads, held;
};
struct Product {
    float* sums;
    int columns;
    unsigned long long a, b;
    int add, depth;  // depth: 16, or 32 of E4M3
    float before;  // the sum of what is multiplied; of a warpgroup's first and last thread
    bool operator==(const Product& other) const {
        return columns == other.columns && a == other.a && b == other.b && add == other.add && depth == other.depth;
    }
};
struct Word {
    unsigned to;
    const unsigned* from;
};
struct Store {
    const Map* map;
    int x, y;
    unsigned from;
};
struct Own {  // of a thread
    std::vector<Product> products;
    std::deque<std::vector<Product>> committed;
    std::vector<Word> words;
    std::vector<Store> stores;
    bool unseen = false, stored = false;
    unsigned addresses[LANES];  // of a lane's warp: lane 0 has them
    unsigned pairs[LANES][4];
};
struct Group {
    unsigned arrived, held;
};
struct State {
    std::vector<char> memory;
    std::map<unsigned, Phases> barriers;
    Meeting meetings[MOST_BARRIERS] = {};
    std::vector<Own> own;
    std::vector<Group> groups;
};

std::vector<State> states;  // of the cluster's blocks

State& state() { return states[current_place().block]; }
Own& own() { return state().own[current_place().thread]; }

char* at(State& of, unsigned address, unsigned size) {
    if (address > of.memory.size() || size > of.memory.size() - address) wrong("not in the block's shared memory");
    return of.memory.data() + address;
}

unsigned swizzled(unsigned address) { return address ^ (address >> 3 & 0x70); }

Phases& phases(State& of, unsigned address) {
    const auto found = of.barriers.find(address);
    if (found == of.barriers.end()) wrong("there is no barrier");
    return found->second;
}

void settle(Phases& one) {
    if (one.missing < 0) wrong("more arrive at a barrier than it waits for");
    if (one.missing || one.bytes) return;
    one.missing = one.count;
    one.parity ^= 1;
}

float number(const char* at, bool eight) {
    if (eight) return of_eight(*at);
    _Float16 value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

constexpr int MOST_COLUMNS = 256, MOST_DEPTH = 32;
float a[64][MOST_DEPTH], b[MOST_COLUMNS][MOST_DEPTH];

// Reads a and b. Returns their sum, which is no number while something is not there.
float gather(State& of, const Product& one) {
    const auto start = [](unsigned long long matrix) { return (unsigned)(matrix & 0x3fff) << 4; };
    const auto leading = [](unsigned long long matrix) { return (unsigned)(matrix >> 16 & 0x3fff) << 4; };
    const auto stride = [](unsigned long long matrix) { return (unsigned)(matrix >> 32 & 0x3fff) << 4; };
    if (one.a >> 62 != 1 || one.b >> 62 != 1) wrong("a matrix is not swizzled by 128 bytes");
    const bool eight = one.depth == 32;
    const unsigned size = eight ? 1 : 2;
    float sum = 0;
    for (unsigned k = 0; k < (unsigned)one.depth; ++k) {
        for (unsigned row = 0; row < 64; ++row) {
            const unsigned from = start(one.a) + row / 8 * stride(one.a) + row % 8 * 128 + k * size;
            sum += a[row][k] = number(at(of, swizzled(from), size), eight);
        }
        for (unsigned column = 0; column < (unsigned)one.columns; ++column) {
            const unsigned row = k / 8 * stride(one.b) + k % 8 * 128;
            const unsigned across = column / 64 * leading(one.b) + row + column % 64 * 2;
            const unsigned along = column / 8 * stride(one.b) + column % 8 * 128 + k;
            sum += b[column][k] = number(at(of, swizzled(start(one.b) + (eight ? along : across)), size), eight);
        }
    }
    return sum;
}

// Of all threads of a warpgroup: their parts of 64 rows.
void multiply_all(State& of, unsigned first, const std::vector<Product>& ones) {
    for (const Product& other : ones)
        if (!(other == ones[0])) wrong("a warpgroup's threads are at different products");
    const float sum = gather(of, ones[0]);
    if (sum != ones.front().before || sum != ones.back().before) wrong("what is multiplied was not there, or goes too early");
    for (unsigned thread = first; thread < first + WARPGROUP; ++thread) {
        const unsigned lane = thread % LANES, row = thread % WARPGROUP / LANES * 16 + lane / 4;
        for (int i = 0; i < ones[0].columns / 2; ++i) {
            const float *left = a[row + i / 2 % 2 * 8], *right = b[i / 4 * 8 + lane % 4 * 2 + i % 2];
            float product = 0;
            for (int k = 0; k < ones[0].depth; ++k) product += left[k] * right[k];
            float& to = ones[thread - first].sums[i];
            to = ones[0].add ? to + product : product;
        }
    }
}

void begin_product(float* sums, int columns, unsigned long long a, unsigned long long b, int add, int depth) {
    const unsigned thread = current_place().thread % WARPGROUP;
    Product one = {sums, columns, a, b, add != 0, depth, 0};
    if (thread == 0 || thread == WARPGROUP - 1) one.before = gather(state(), one);
    own().products.push_back(one);
}

void do_stores() {
    for (const Store& one : own().stores) {
        const Map& map = *one.map;
        for (unsigned row = 0; row < map.box_rows && one.y + row < map.rows; ++row)
            for (unsigned column = 0; column < map.box_columns && one.x + column < map.columns; ++column)
                std::memcpy(map.address + (one.y + row) * map.stride + (one.x + column) * 2,
                            at(state(), swizzled(one.from + row * 128 + column * 2), 2), 2);
    }
    own().stores.clear();
}

}  // namespace

void begin_hopper(unsigned blocks, unsigned threads, unsigned shared) {
    if (shared > BLOCK_SHARED) wrong("more shared memory than a block can have");
    states.assign(blocks, {});
    for (State& one : states) {
        one.memory.assign(shared, (char)0xff);
        one.own.resize(threads);
        one.groups.resize((threads + WARPGROUP - 1) / WARPGROUP);
    }
}

void end_hopper() {
    for (const State& block : states)
        for (const Own& one : block.own)
            if (!one.products.empty() || !one.committed.empty() || !one.words.empty() || !one.stores.empty())
                wrong("a thread ends before what it has begun");
}

int describe_matrix(TensorMap* map, int type, unsigned rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                    const unsigned* box, const unsigned* each, int interleave, int swizzle, int promotion, int fill) {
    const unsigned size = type == 6 ? 2 : 1;
    const bool aligned = (uintptr_t)map % 64 == 0 && (uintptr_t)address % 16 == 0 && strides[0] % 16 == 0;
    const bool fits = sizes[0] && sizes[1] && strides[0] >= sizes[0] * size && box[0] * size == 128 && box[1] && box[1] <= 256;
    if ((type != 6 && type != 0) || rank != 2 || !aligned || !fits || each[0] != 1 || each[1] != 1 || interleave || swizzle != 3 ||
        promotion > 3 || fill)
        return 1;
    const Map made = {static_cast<char*>(address), sizes[0], sizes[1], strides[0], box[0], box[1], size};
    std::memcpy(map->content, &made, sizeof made);
    return 0;
}

unsigned dynamic_shared() { return 0; }

void make_barrier(unsigned address, int count) {
    if (address % 8) wrong("a barrier is not aligned");
    at(state(), address, 8);
    state().barriers[address] = {count, count, 0, 0};
}
void barriers_are_made() {}

void arrive_and_expect(unsigned address, int bytes) {
    Phases& one = phases(state(), address);
    one.bytes += bytes, --one.missing;
    settle(one);
}

void arrive(unsigned address) {
    Phases& one = phases(state(), address);
    --one.missing;
    settle(one);
}

void wait_for_phase(unsigned address, int parity) {
    const Phases& one = phases(state(), address);
    wait_until([&one, parity] { return one.parity != parity; });
}

void load_tile(unsigned to, const TensorMap* given, int x, int y, unsigned barrier) {
    Map map;
    std::memcpy(&map, given->content, sizeof map);
    if (to % 1024) wrong("a tile does not begin where the swizzle does");
    for (unsigned row = 0; row < map.box_rows; ++row)
        for (unsigned column = 0; column < map.box_columns; ++column) {
            char* here = at(state(), swizzled(to + row * 128 + column * map.size), map.size);
            if (y + row < map.rows && x + column < map.columns)
                std::memcpy(here, map.address + (y + row) * map.stride + (x + column) * map.size, map.size);
            else std::memset(here, 0, map.size);
        }
    Phases& one = phases(state(), barrier);
    one.bytes -= map.box_rows * map.box_columns * map.size;
    settle(one);
}
void prefetch(const TensorMap*) {}

void store_tile(const TensorMap* map, int x, int y, unsigned from) {
    if (from % 1024) wrong("a tile does not begin where the swizzle does");
    const unsigned first = current_place().thread / WARPGROUP * WARPGROUP;
    for (unsigned i = first; i < first + WARPGROUP && i < state().own.size(); ++i)
        if (state().own[i].unseen) wrong("what is stored was not shown");
    own().stores.push_back({reinterpret_cast<const Map*>(map->content), x, y, from});
    own().stored = false;
}
void commit_stores() { own().stored = true; }
void wait_for_reads() {
    if (!own().stores.empty() && !own().stored) wrong("stores are waited for that were not committed");
    do_stores();
}
void wait_for_stores() { wait_for_reads(); }
void show_to_stores() { own().unseen = false; }

void copy_word(unsigned to, const unsigned* from) { own().words.push_back({to, from}); }
void wait_for_words() {
    for (const Word& one : own().words) {
        const unsigned value = *one.from;
        std::memcpy(at(state(), one.to, 4), &value, 4);
    }
    own().words.clear();
}
unsigned word_at(unsigned address) {
    unsigned value;
    std::memcpy(&value, at(state(), address, 4), 4);
    return value;
}

void store_matrices(unsigned address, const unsigned (&pairs)[4]) {
    const unsigned thread = current_place().thread, lane = thread % LANES;
    Own& of_warp = state().own[thread - lane];
    meet_warp();  // those of the time before have been read
    of_warp.addresses[lane] = address;
    std::memcpy(of_warp.pairs[lane], pairs, sizeof pairs);
    meet_warp();
    for (unsigned i = 0; i < 4; ++i)
        std::memcpy(at(state(), of_warp.addresses[lane] + i * 4, 4), &of_warp.pairs[lane % 8 * 4 + i][lane / 8], 4);
    own().unseen = true;
}

void meet(int barrier, int threads) {
    signal(barrier, threads);
    const Meeting& one = state().meetings[barrier];
    const unsigned held = one.held;
    if (one.arrived) wait_until([&one, held] { return one.held != held; });
}
void signal(int barrier, int threads) {
    if (barrier < 1 || barrier >= (int)MOST_BARRIERS || threads % LANES) wrong("there is no such meeting");
    Meeting& one = state().meetings[barrier];
    if (one.arrived && one.threads != (unsigned)threads) wrong("threads meet that expect different numbers");
    one.threads = threads;
    if (++one.arrived == one.threads) one.arrived = 0, ++one.held;
}

void multiply(float (&sums)[128], unsigned long long a, unsigned long long b, int add) {
    begin_product(sums, 256, a, b, add, 16);
}
void multiply(float (&sums)[64], unsigned long long a, unsigned long long b, int add) {
    begin_product(sums, 128, a, b, add, 16);
}
void multiply_eights(float (&sums)[80], unsigned long long a, unsigned long long b, int add) {
    begin_product(sums, 160, a, b, add, 32);
}
void begin_products() {}
void commit_products() {
    own().committed.push_back(std::move(own().products));
    own().products.clear();
}
void wait_for_products(unsigned left) {
    const unsigned thread = current_place().thread, first = thread / WARPGROUP * WARPGROUP;
    Group& group = state().groups[thread / WARPGROUP];
    if (first + WARPGROUP > state().own.size()) wrong("not a whole warpgroup");
    if (!own().products.empty()) wrong("products are waited for that were not committed");
    if (++group.arrived < WARPGROUP) {  // of a warpgroup they end together
        const unsigned held = group.held;
        return wait_until([&group, held] { return group.held != held; });
    }
    std::vector<Product> ones(WARPGROUP);
    while (state().own[first].committed.size() > left) {
        const std::size_t count = state().own[first].committed[0].size();
        for (std::size_t i = 0; i < count; ++i) {
            for (unsigned j = 0; j < WARPGROUP; ++j) {
                const Own& one = state().own[first + j];
                if (one.committed.empty() || one.committed[0].size() != count) wrong("a warpgroup's threads are at different products");
                ones[j] = one.committed[0][i];
            }
            multiply_all(state(), first, ones);
        }
        for (unsigned j = 0; j < WARPGROUP; ++j) state().own[first + j].committed.pop_front();
    }
    group.arrived = 0, ++group.held;
}
