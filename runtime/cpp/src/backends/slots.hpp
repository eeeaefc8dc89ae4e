// K/V slots in one block of memory [layers * 2, kv_heads, capacity, head_dim].
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/tensors.hpp"

namespace vtxcore {

// Zeros that take memory where they are written, page by page of the smallest size: a cache that is filled in part has
// its slots in as many places as it has heads, and large pages would make all of it resident.
class ZeroedPages {
 public:
  // Throws Error(device), which names the `capacity` of the cache that they are for, if there is no memory.
  ZeroedPages(size_t bytes, size_t capacity);
  ~ZeroedPages();
  ZeroedPages(const ZeroedPages&) = delete;
  ZeroedPages& operator=(const ZeroedPages&) = delete;

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }

 private:
  size_t size_;
  uint8_t* data_;
};

// The number of first slots that each token sees which follows `length` filled ones, its own among them. Tokens of one
// group (names::kGroup), which stand together, see as far as the last of them.
Ids seen_slots(const TokenStates& tokens, int64_t length);

// The block, zeroed. Throws Error(device) if there is no memory.
class SlotMemory {
 public:
  SlotMemory(size_t planes, size_t capacity, size_t slot_bytes);

  uint8_t* plane(size_t index) { return memory_.data() + index * capacity_ * slot_bytes_; }  // [capacity, head_dim]
  SavedSlots read(const Ids& slots) const;
  void write(const Ids& slots, const SavedSlots& kv);

 private:
  size_t planes_, capacity_, slot_bytes_;
  ZeroedPages memory_;
};

}  // namespace vtxcore
