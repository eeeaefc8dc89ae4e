// Weights that are made while a bundle is loaded, on disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "backends/openvino/bridge.hpp"

namespace vtxcore {

// A temporary file without a name: its pages need not stay in memory once the engine has packed them. It lies in $TMPDIR,
// else in /var/tmp, which by custom is not in memory, as /tmp may be. What cannot be written is an Error(device).
class WeightsOnDisk : public openvino::WeightMemory {
 public:
  WeightsOnDisk();
  ~WeightsOnDisk() override;
  WeightsOnDisk(const WeightsOnDisk&) = delete;
  WeightsOnDisk& operator=(const WeightsOnDisk&) = delete;

  int8_t* take(size_t bytes) override;
  // No more is written to what was taken.
  void seal();

 private:
  [[noreturn]] void fail_with(int error) const;

  std::string folder_;
  int file_;
  size_t size_ = 0;
  std::vector<std::pair<void*, size_t>> parts_;
};

}  // namespace vtxcore
