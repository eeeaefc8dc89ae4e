// The TensorRT backend: engines that vtx-build made of the bundle's graphs, K and V in device memory.
//
// TensorRT and TensorRT-RTX are one API under two names. All work of a backend goes to one stream, one call after the
// other; device memory for inputs and outputs is owned once, by tensor name.
#pragma once

#include "backends/engines.hpp"

namespace vtxcore {

Engine tensorrt_engine();

}  // namespace vtxcore
