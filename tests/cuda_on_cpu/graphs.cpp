#include "graphs.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <list>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "threads.h"

extern "C" const char* sdflow_memsets_as_kernels(void* graph, std::size_t counts[2]);

namespace {

// As memset_nodes.c has them.
struct Memset {
    uint64_t to;
    std::size_t pitch;
    unsigned value, element;
    std::size_t width, height;
};
struct KernelNode {
    void* function;
    unsigned grid[3], block[3], shared;
    void **arguments, **extra, *kernel, *context;
};
struct Edge {
    unsigned char from_port, to_port, type, reserved[5];
};

enum { KERNEL = 0, MEMCPY = 1, MEMSET = 2, HOST = 3, INVALID_VALUE = 1 };

struct Node {
    int type;
    std::string name;
    Memset set{};
    const Kernel* function = nullptr;
    Place grid{}, block{};
    uint64_t to = 0, bytes = 0;
    unsigned pattern = 0;
};

struct Arc {
    Node *from, *to;
    Edge edge;
};

struct Graph {
    std::list<Node> nodes;
    std::vector<Arc> arcs;
};

Graph* the_graph;  // functions of a node do not get its graph

int nodes_of(void* graph, void** nodes, std::size_t* count) {
    auto& all = static_cast<Graph*>(graph)->nodes;
    if (!nodes) return *count = all.size(), 0;
    std::size_t i = 0;
    for (Node& node : all)
        if (i < *count) nodes[i++] = &node;
    return *count = i, 0;
}

int type_of(void* node, int* type) { return *type = static_cast<Node*>(node)->type, 0; }

int memset_of(void* node, Memset* set) {
    auto* one = static_cast<Node*>(node);
    if (one->type != MEMSET) return INVALID_VALUE;
    return *set = one->set, 0;
}

int neighbours(void* node, void** found, Edge* edges, std::size_t* count, Node* Arc::*of, Node* Arc::*other) {
    std::size_t i = 0;
    for (const Arc& arc : the_graph->arcs) {
        if (arc.*of != node) continue;
        if (i == *count) return INVALID_VALUE;
        found[i] = arc.*other, edges[i++] = arc.edge;
    }
    return *count = i, 0;
}
int before(void* node, void** found, Edge* edges, std::size_t* count) {
    return neighbours(node, found, edges, count, &Arc::to, &Arc::from);
}
int after(void* node, void** found, Edge* edges, std::size_t* count) {
    return neighbours(node, found, edges, count, &Arc::from, &Arc::to);
}

int add_kernel(void** made, void* graph, void* const*, std::size_t earlier, const KernelNode* given) {
    auto* function = static_cast<const Kernel*>(given->function);
    if (earlier || !given->grid[0] || given->block[0] > function->most_threads || given->shared) return INVALID_VALUE;
    Node node{KERNEL, "made"};
    node.function = function;
    node.grid = {given->grid[0], given->grid[1], given->grid[2]};
    node.block = {given->block[0], given->block[1], given->block[2]};
    node.to = *static_cast<uint64_t*>(given->arguments[0]);  // the driver copies arguments, too
    node.pattern = *static_cast<unsigned*>(given->arguments[1]);
    node.bytes = *static_cast<uint64_t*>(given->arguments[2]);
    auto& nodes = static_cast<Graph*>(graph)->nodes;
    nodes.push_back(node);
    return *made = &nodes.back(), 0;
}

int connect(void* graph, void* const* from, void* const* to, const Edge* edges, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i)
        static_cast<Graph*>(graph)->arcs.push_back({static_cast<Node*>(from[i]), static_cast<Node*>(to[i]), edges[i]});
    return 0;
}

int destroy(void* node) {
    std::erase_if(the_graph->arcs, [&](const Arc& arc) { return arc.from == node || arc.to == node; });
    return the_graph->nodes.remove_if([&](const Node& one) { return &one == node; }) == 1 ? 0 : INVALID_VALUE;
}

using Names = std::multiset<std::string>;

// Which kernels and copies follow which, with what is between them as they are found; edges' kinds too.
Names edges_of(const Graph& graph) {
    Names found;
    for (const Arc& arc : graph.arcs) found.insert(arc.from->name + " > " + arc.to->name + " " + std::to_string(arc.edge.type));
    return found;
}

void replay(Graph& graph, bool backwards) {
    for (Node& node : graph.nodes) {
        if (node.type == MEMSET) {
            auto* to = reinterpret_cast<unsigned char*>(node.set.to);
            for (std::size_t row = 0; row < node.set.height; ++row)
                for (std::size_t i = 0; i < node.set.width; ++i)
                    std::memcpy(to + row * node.set.pitch + i * node.set.element, &node.set.value, node.set.element);
        } else if (node.function) {
            void* arguments[] = {&node.to, &node.pattern, &node.bytes};
            run_grid(*node.function, node.grid, node.block, 1, 0, arguments, backwards);
        }
    }
}

}  // namespace

void* graph_function(const char* name) {
    static const std::map<std::string, void*> functions = {
        {"cuGraphGetNodes", (void*)nodes_of},
        {"cuGraphNodeGetType", (void*)type_of},
        {"cuGraphMemsetNodeGetParams", (void*)memset_of},
        {"cuGraphNodeGetDependencies_v2", (void*)before},
        {"cuGraphNodeGetDependentNodes_v2", (void*)after},
        {"cuGraphAddKernelNode_v2", (void*)add_kernel},
        {"cuGraphAddDependencies_v2", (void*)connect},
        {"cuGraphDestroyNode", (void*)destroy},
    };
    const auto found = functions.find(name);
    return found == functions.end() ? nullptr : found->second;
}

void check_memsets_as_kernels(int hosts, bool backwards) {
    static unsigned char memory[8192], expected[sizeof memory];
    const auto at = [](std::size_t place) { return (uint64_t)(memory + place); };
    const Memset sets[] = {
        {at(1), 0, 0x5a, 1, 13, 1},           // bytes, from no whole word on
        {at(64), 0, 0xdeadbeef, 4, 300, 1},   // words, more than a block has
        {at(2002), 0, 0x1234, 2, 7, 1},       // pairs of bytes
        {at(3000), 16, 0x77, 1, 5, 3},        // rows: stays
        {at(4096), 0, 0, 1, 4, 1},            // what cuDNN clears
    };
    Graph graph;
    the_graph = &graph;
    const auto add = [&](Node node) { return graph.nodes.push_back(node), &graph.nodes.back(); };
    Node* last = add({KERNEL, "first"});
    for (std::size_t i = 0; i < std::size(sets); ++i) {
        Node* set = add({MEMSET, "set", sets[i]});
        Node* next = add({i % 2 ? MEMCPY : KERNEL, "next" + std::to_string(i)});
        graph.arcs.push_back({last, set, {}});
        graph.arcs.push_back({set, next, {}});
        graph.arcs.push_back({last, next, {1, 0, 1, {}}});  // of programmatic dependent launch
        last = next;
    }
    for (int i = 0; i < hosts; ++i) graph.arcs.push_back({last, add({HOST, "host"}), {}});
    std::memset(memory, 0xab, sizeof memory);
    replay(graph, backwards);
    std::memcpy(expected, memory, sizeof memory);
    Names edges = edges_of(graph);

    std::size_t counts[2];
    if (const char* why = sdflow_memsets_as_kernels(&graph, counts)) wrong(why);
    std::printf("%zu %zu\n", counts[0], counts[1]);
    std::memset(memory, 0xab, sizeof memory);
    replay(graph, backwards);
    if (std::memcmp(memory, expected, sizeof memory)) wrong("the kernels write other bytes than the memsets");
    for (Node& node : graph.nodes)
        if (node.name == "made") node.name = "set";
    if (edges_of(graph) != edges) wrong("the graph has other edges than before");
}
