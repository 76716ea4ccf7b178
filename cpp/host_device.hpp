// EDGEYOLO_HD marks a function that both the host compiler and nvcc compile, so that CPU and GPU share one formula.
#pragma once

#ifdef __CUDACC__
#define EDGEYOLO_HD __host__ __device__
#else
#define EDGEYOLO_HD
#endif
