// Where a bundle can be answered: what its graphs are written for, what is installed, and which of it is best.
#pragma once

#include <memory>
#include <string>

#include "backends/engines.hpp"

namespace vtxcore {

// `device`: the name of an engine's, or "auto" for the best of those that are possible here. Throws Error(device) where
// the device is unknown or cannot answer this bundle here, Error(bundle) where a graph is not what the manifest promises.
std::unique_ptr<Backend> open_backend(const Bundle& bundle, const std::string& device, BackendOptions options);

}  // namespace vtxcore
