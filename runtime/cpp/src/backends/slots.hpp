// K/V slots in one block of memory, planes of [capacity, head_dim]: of each layer its keys, then its values, head by head.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

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

// Of these tokens the first of the group that the n-th one continues, or the n-th.
size_t begin_of_group(const TokenStates& tokens, size_t number);

// Where runs of the tokens from `first` to before `end` end: nearly alike and of `most` at most (0: any number), but for one
// group, as none is cut in two.
std::vector<size_t> run_ends(const TokenStates& tokens, size_t first, size_t end, size_t most);

// Where parts of these tokens end, each of `most` at most, but for one group, as none is cut in two.
std::vector<size_t> part_ends(const TokenStates& tokens, size_t most);

// The block, zeroed; `slot_bytes` of each plane. Throws Error(device) if there is no memory.
class SlotMemory {
 public:
  SlotMemory(const std::vector<size_t>& slot_bytes, size_t capacity);

  uint8_t* plane(size_t index) { return memory_.data() + begins_[index]; }  // [capacity, head_dim]
  SavedSlots read(const Ids& slots) const;
  void write(const Ids& slots, const SavedSlots& kv);

 private:
  std::vector<size_t> slot_bytes_, begins_;
  ZeroedPages memory_;
};

}  // namespace vtxcore
