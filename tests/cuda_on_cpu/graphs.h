// The driver's functions for CUDA graphs (memset_nodes.c), and a graph to try them on.
#pragma once

// Null where the name is no function of graphs.
void* graph_function(const char* name);

// Makes a graph of kernels, copies and memsets, has its memsets made kernels, replays both on memory of its own, and compares
// memory and edges. Ends the process with what is wrong. hosts: nodes that call the processor. Prints the two counts.
void check_memsets_as_kernels(int hosts, bool backwards);
