// The ONNX Runtime backend: one session per graph, K/V updated in place.
#pragma once

#include <memory>
#include <string>

#include "backends/backend.hpp"
#include "bundle/bundle.hpp"

namespace vtxcore {

// Loads the bundle's graphs. `threads` 0 means all cores; `library` as for `Library`. Throws Error(device) where the
// library is missing or too old, Error(bundle) where a graph is not what the manifest promises.
std::unique_ptr<Backend> open_ort(const Bundle& bundle, int threads, const std::string& library);

}  // namespace vtxcore
