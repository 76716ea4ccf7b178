// For machines without the CUDA toolkit: what TensorRT's runtime headers use of CUDA's, two opaque handles.
#pragma once
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
