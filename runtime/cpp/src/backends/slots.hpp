// K/V slots in one block of memory [layers * 2, kv_heads, capacity, head_dim].
#pragma once

#include <cstddef>
#include <string>

#include "base/tensors.hpp"

namespace vtxcore {

// The block, zeroed, in pages of the smallest size: a cache that is filled in part has its slots in as many places as
// it has heads, and large pages would make all of it resident. Throws Error(device) where there is no memory.
class SlotMemory {
 public:
  SlotMemory(size_t planes, size_t capacity, size_t slot_bytes);
  ~SlotMemory();
  SlotMemory(const SlotMemory&) = delete;
  SlotMemory& operator=(const SlotMemory&) = delete;

  uint8_t* plane(size_t index) { return data_ + index * capacity_ * slot_bytes_; }  // [capacity, head_dim]
  std::string read(const Ids& slots) const;
  void write(const Ids& slots, const std::string& kv);

 private:
  size_t planes_, capacity_, slot_bytes_, size_;
  uint8_t* data_;
};

// A half-precision number's value.
float half_to_float(uint16_t half);

}  // namespace vtxcore
