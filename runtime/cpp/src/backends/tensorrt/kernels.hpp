// The kernels that TensorRT-RTX compiles for this GPU as they first run, kept in a file next to the engines.
#pragma once

#include <string>

#include "bundle/bundle.hpp"
#include "plugins/tensorrt.hpp"

namespace vtxcore {

// Gives the runtime what the file of the engines' target has, and writes it again as it goes if there are new ones. Engines
// are signed and this file is not, so nothing is kept for a bundle that must be signed, nor of a release that compiles none.
class KernelCache {
 public:
  KernelCache(const Bundle& bundle, const std::string& target, tensorrt::Runtime& runtime);
  ~KernelCache();
  KernelCache(const KernelCache&) = delete;
  KernelCache& operator=(const KernelCache&) = delete;

 private:
  void save();

  tensorrt::Runtime& runtime_;
  std::string directory_;  // "" where nothing is kept
  std::string saved_;
};

}  // namespace vtxcore
