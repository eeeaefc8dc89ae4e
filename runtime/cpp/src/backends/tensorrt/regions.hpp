// Where K and V of a stage's layers lie in a buffer: layers whose heads have one size are a region of equal parts.
#pragma once

#include <vector>

#include "backends/tensorrt/cuda.hpp"
#include "bundle/manifest.hpp"

namespace vtxcore {

// Parts [slots, kv_heads, head_dim], each layer's keys, then its values, from `address` on, `pitch` bytes apart. `row`:
// bytes of one slot in a part.
struct Region {
  Ids layers;
  size_t row;
  uint8_t* address;
  size_t pitch;

  size_t parts() const { return 2 * layers.size(); }
  uint8_t* end() const { return address + parts() * pitch; }
};
using Regions = std::vector<Region>;

// The regions of a stage's K and V, by the bytes of a slot of their layers; `number_bytes` of a number.
class KVLayout {
 public:
  KVLayout(const ModelSpec& model, const StageSpec& spec, int64_t number_bytes);
  // In a buffer of `slots` slots at `address`; parts are aligned unless they are `packed`.
  Regions regions(uint8_t* address, size_t slots, bool packed = false) const;
  // Bytes of such a buffer.
  size_t bytes(size_t slots, bool packed = false) const;
  // Whether every slot has an address that TensorRT takes, so that engines write new K and V where they belong.
  bool written_in_place() const;

 private:
  std::vector<std::pair<size_t, Ids>> layers_;
};

// The same parts from that slot on.
Regions from_slot(Regions regions, int64_t slot);
// A layer's keys, or its values.
uint8_t* part_of(const Regions& regions, int64_t layer, bool values);
// Queues a copy of the first `slots` slots of every part.
void copy_slots(Cuda& cuda, const Regions& to, const Regions& from, size_t slots);

}  // namespace vtxcore
