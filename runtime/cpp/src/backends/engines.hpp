// The engines that graphs run on, a folder each. None is linked: each finds its library when it is asked.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/backend.hpp"
#include "bundle/bundle.hpp"

namespace vtxcore {

struct BackendOptions {
  int threads = 0;      // 0: all cores
  std::string library;  // the engine's, a file or a directory; empty: searched for, see `Library`
  std::string compute;  // the type of the arithmetic; empty: the engine's default
  int gpu = 0;          // among those that the driver shows
};

// What computes on a device: the dialect it reads, and its arithmetic, the default first.
struct Engine {
  const char* device;
  const char* dialect;
  std::vector<std::string> compute;
  bool gpu;  // a device of which there may be several
  // The largest of those that are possible is "auto": 0 where another engine was measured to be faster, 1 the default,
  // 2 where this one was measured to be faster, 3 where the bundle was prepared for this very machine.
  int (*merit)(const Bundle& bundle);
  // Throws Error with the fix unless the engine can answer this bundle here. Runs nothing.
  void (*check)(const Bundle& bundle, const BackendOptions& options);
  // Loads the bundle's graphs. Throws Error(device), Error(bundle).
  std::unique_ptr<Backend> (*open)(const Bundle& bundle, const BackendOptions& options);
};

// A folder each: devices "cpu", "openvino" and "tensorrt".
Engine ort_engine();
Engine openvino_engine();
Engine tensorrt_engine();

// The name of a device and the number of its GPU: "tensorrt:1" is the second one that the driver shows. Throws
// Error(device) if there is no such device, or if it takes no number.
std::pair<std::string, int> split_device(const std::string& device);

// All of them, in the order in which messages name them.
const std::vector<Engine>& engines();

// Why the engine of this device cannot answer in the arithmetic of `options`, and the fix; empty if it can.
std::string obstacle(const Bundle& bundle, const std::string& device, const BackendOptions& options);

// `device`: the name of an engine's, or "auto" for the best of those that are possible here. Throws Error(device) where
// the device is unknown or cannot answer this bundle here, Error(bundle) where a graph is not what the manifest promises.
std::unique_ptr<Backend> open_backend(const Bundle& bundle, const std::string& device, BackendOptions options);

}  // namespace vtxcore
