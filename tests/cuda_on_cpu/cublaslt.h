// What the operators take of cuBLASLt, on the CPU: products of matrices of E4M3 with scales of rows and columns.
#pragma once

extern char a_stream;  // its address stands for the one stream

// Null for a function that is not there.
void* cublaslt_function(const char* name);
