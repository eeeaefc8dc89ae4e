// The ONNX Runtime backend: one session per graph, K/V updated in place.
#pragma once

#include "backends/engines.hpp"

namespace vtxcore {

// Device "cpu".
Engine ort_engine();

}  // namespace vtxcore
