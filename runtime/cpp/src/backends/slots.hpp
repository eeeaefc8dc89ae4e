// K/V slots in one block of memory [layers * 2, kv_heads, capacity, head_dim].
#pragma once

#include <cstddef>
#include <string>

#include "backends/allocation.hpp"
#include "base/tensors.hpp"

namespace vtxcore {

// The block, zeroed. Throws Error(device) where there is no memory.
class SlotMemory {
 public:
  SlotMemory(size_t planes, size_t capacity, size_t slot_bytes);

  uint8_t* plane(size_t index) { return memory_.data() + index * capacity_ * slot_bytes_; }  // [capacity, head_dim]
  std::string read(const Ids& slots) const;
  void write(const Ids& slots, const std::string& kv);

 private:
  size_t planes_, capacity_, slot_bytes_;
  ZeroedPages memory_;
};

}  // namespace vtxcore
