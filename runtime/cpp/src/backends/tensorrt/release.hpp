// The TensorRT of this machine that a bundle's engines were built with, and the plug-in of libvtx that speaks to it.
#pragma once

#include <memory>
#include <string>

#include "backends/loading.hpp"
#include "bundle/fingerprint.hpp"
#include "plugins/tensorrt.hpp"

namespace vtxcore {

// TensorRT's library, loaded, and its version as engines.json records it.
class Release {
 public:
  // `path`: the library's file or directory, empty for the search. Throws Error(device) if it is missing.
  Release(const EngineSet& engines, const std::string& path);

  // With as many parts as `like` has: 10.3.0 or 10.3.0.26.
  std::string version(const std::string& like) const;
  const std::string& where() const { return library_.where(); }
  // Throws Error(device) where libvtx has no plug-in for this release, or TensorRT does not start.
  std::unique_ptr<tensorrt::Runtime> runtime() const;

 private:
  void* plugin() const;

  Library library_;
  int parts_[4];
};

}  // namespace vtxcore
