// The two opaque types of CUDA's runtime that TensorRT's headers name, for builds without CUDA's own headers.
#pragma once

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
