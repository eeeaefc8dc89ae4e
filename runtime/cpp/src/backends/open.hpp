// Which backend answers.
#pragma once

#include <memory>
#include <string>

#include "backends/backend.hpp"
#include "bundle/bundle.hpp"

namespace vtxcore {

// `device`: "cpu" (ONNX Runtime), or "auto" for the best that is possible here. Throws Error(device) where the device is
// unknown or its library missing, Error(bundle) where a graph is not what the manifest promises.
std::unique_ptr<Backend> open_backend(const Bundle& bundle, const std::string& device, int threads,
                                      const std::string& library);

}  // namespace vtxcore
