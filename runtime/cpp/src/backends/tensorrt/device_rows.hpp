// Hidden states in the GPU's memory, which go from one stage to the next without the host in between.
#pragma once

#include <memory>

#include "backends/tensorrt/cache.hpp"

namespace vtxcore {

// Rows in memory that several of them share, and that the last of them gives back. All work on it goes to the one stream.
class TensorrtRows : public DeviceRows {
 public:
  // To be written by whoever makes it, while a Use is held. Memory has powers of two, so that prompts share it.
  TensorrtRows(TensorrtCacheContext& context, size_t count);

  size_t count() const override { return count_; }
  Floats read() const override;
  std::shared_ptr<const DeviceRows> take(const Ids& which) const override;
  std::shared_ptr<const DeviceRows> joined(const Rows& first, const Rows& second) const override;
  uint8_t* row(size_t token) const { return first_ + token * row_bytes(); }

 private:
  size_t row_bytes() const { return static_cast<size_t>(context_.manifest.model.hidden) * sizeof(float); }

  TensorrtCacheContext& context_;
  std::shared_ptr<StageMemory> memory_;
  uint8_t* first_;
  size_t count_;
};

// Queues a copy of `count` rows from `start` on, of the host or of the device, to `to`. A Use is held meanwhile.
void put(Cuda& cuda, uint8_t* to, const Rows& rows, size_t start, size_t count);

}  // namespace vtxcore
