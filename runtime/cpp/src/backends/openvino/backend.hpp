// The OpenVINO backend: one compiled graph a stage, K and V in blocks that one infer request a cache fills.
#pragma once

#include "backends/engines.hpp"

namespace vtxcore {

// Device "openvino".
Engine openvino_engine();

}  // namespace vtxcore
